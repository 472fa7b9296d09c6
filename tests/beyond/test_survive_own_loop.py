"""survive's modules work alone, and in a loop that is not of this project: own_loop.py."""

import re
import sys

import pytest
import torch

from local_ranks.scripts import launch_script, run_script
from local_ranks.stage_files import LESSON_FOLDERS
from markers import fences

OWN_LOOP = LESSON_FOLDERS["survive"] / "own_loop.py"
NAMES = ("launch", "agree", "watchdog", "durable", "rank_loader")
MODULES = [LESSON_FOLDERS["survive"] / f"{name}.py" for name in NAMES]

SHOWS = {  # all that a module prints when it is run, its lines sorted
    "launch": r"1 of 2 ranks start: rank 0 ends with: 2 ranks did not meet .+"
    r"(\n2 of 2 ranks start: rank [01] has joined gloo){2}",
    "agree": r"rank 0 stops after step (1[0-3]\d); votes .+\nrank 1 receives .+ in step 100\n"
    r"rank 1 stops after step \1; votes .+",
    "watchdog": r"error: rank 0 gives up at step 3, line \d+, `dist\.barrier\(\)`: "
    r"rank 1 did not arrive, last seen at step 3, line \d+, `.+`: killed, .+",
}


@pytest.mark.parametrize("name", SHOWS)
def test_each_module_shows_by_itself_what_it_does(name):
    [(status, output)] = run_script(f"beyond/survive/{name}.py")
    assert status == 0, output
    lines = [line for line in output.splitlines() if not line.startswith("[W")]
    assert re.fullmatch(SHOWS[name], "\n".join(sorted(lines))), output


def imported(text: str) -> set[str]:
    return {*re.findall(r"^ *(?:from|import) (\w+)", text, re.M)} - sys.stdlib_module_names


def test_each_module_needs_torch_alone():
    assert [imported(path.read_text()) for path in MODULES] == [{"torch"}] * 5
    own = {path.stem for path in MODULES} - {"rank_loader"}  # this loop has no loader
    assert imported(OWN_LOOP.read_text()) == {"torch", *own}


def test_the_page_shows_in_a_loop_every_line_that_it_marks_as_added():
    marked = re.findall(r"^ *(.+  # \d+\. .+)$", OWN_LOOP.read_text(), re.M)
    [shown] = [fence.text for fence in fences("python", [OWN_LOOP.with_suffix(".md")])]
    compile(shown, "own_loop.md", "exec")  # in their places, not cut out
    assert len(marked) >= 10
    assert [line for line in marked if line not in shown] == []


STEP = "        optimizer.step()\n"
STEP_AND_SIGTERM = f"""{STEP}        import os
        assert Path(durable.__file__).parent == Path(__file__).parent
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "gloo need not listen to the network"
        if agreement.rank == 1 and CHECKPOINT.exists() and "SEND_SIGTERM" in os.environ:
            os.kill(os.getpid(), 15)
"""


def test_a_loop_of_ones_own_stops_and_resumes_to_the_bit(tmp_path):
    """SIGTERM reaches one rank, after the first checkpoint; the modules lie beside the loop."""
    for path in MODULES:
        (tmp_path / path.name).symlink_to(path)
    script = tmp_path / "own_loop.py"
    script.write_text(OWN_LOOP.read_text().replace(STEP, STEP_AND_SIGTERM))

    def last_steps(folder: str, **env: str) -> list[int]:
        (tmp_path / folder).mkdir(exist_ok=True)
        answers = launch_script(str(script), folder, env=env, cwd=tmp_path)
        return [int(re.search(r"ends after step (\d+)", output)[1]) for _, output in answers]

    def weights(file: str) -> torch.Tensor:
        return torch.load(tmp_path / file, weights_only=True)["model"]["weight"]

    step, step_of_the_other = last_steps("parts", SEND_SIGTERM="yes")
    assert 50 < step == step_of_the_other < 200
    assert last_steps("parts") == [200, 200]
    assert last_steps("whole") == [200, 200]
    assert torch.equal(weights("parts/checkpoint.pt"), weights("whole/checkpoint.pt"))
    earlier = weights("parts/checkpoint.before.pt")
    assert not torch.equal(weights("whole/checkpoint.pt"), earlier), "the control"
