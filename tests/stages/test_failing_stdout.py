"""A stdout that fails costs no result: a run saves first, prints after, and leaves no traceback."""

from pathlib import Path

import pytest
import torch

from helpers.refusals import SCRIPTS, assert_one_line
from local_ranks.chapters import ROOT
from local_ranks.run_files import read_metrics
from local_ranks.scripts import launch_script, run_script
from local_ranks.train_stage import few_digits

RANKS = {"01": 1, "survive": 2}
BROKEN_STDOUT = {  # what a process does to its own one, before it becomes a stage
    "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "ASCII": "sys.stdout.reconfigure(encoding='ascii')",
    "closed": """
class Pipe(io.TextIOWrapper):
    def write(self, line):
        if line.startswith("epoch 1"):  # as `| head -1` leaves after the line before
            os.close(reader)
        return super().write(line)

reader, writer = os.pipe()
os.dup2(writer, 1)
sys.stdout = Pipe(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
""",
}
BECOME_THE_STAGE = """
import io, os, runpy, sys
{broken}
sys.path[0] = {folder!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def train_two_epochs(key: str, run_dir: Path, *flags: str, broken: str = "") -> list:
    """Train epochs of 5 steps; return each rank's status and what it says on stderr, or on both."""
    path, script = run_dir.parent / "script.py", ROOT / SCRIPTS[key]
    values = {"broken": broken, "folder": str(script.parent), "script": str(script)}
    path.write_text(BECOME_THE_STAGE.format(**values))
    flags = (*few_digits(), "--batch-size=60", "--epochs=2", "--device=cpu", *flags)
    start = launch_script if RANKS[key] > 1 else run_script
    return start(str(path), *flags, f"--run-dir={run_dir}")


@pytest.mark.parametrize("key", RANKS)
@pytest.mark.parametrize("kind", ["full", "ASCII"])
def test_a_run_goes_on_although_it_cannot_print(kind, key, tmp_path):
    """The folder has a name that is not UTF-8, and rank 0 prints it."""
    run_dir = tmp_path / "run\udcff"
    (status, output), *others = train_two_epochs(key, run_dir, broken=BROKEN_STDOUT[kind])
    assert [status, *(status for status, _ in others)] == [0] * RANKS[key], output
    assert "Traceback" not in output
    assert len(read_metrics(run_dir)) == 10
    if kind == "full":
        complaint = "cannot print ([Errno 28] No space left on device): the run goes on"
        assert output.count("\n") == output.count(complaint) == 1
    else:
        assert output.startswith(rf"global batch 60 = {RANKS[key]} \xd7 {60 // RANKS[key]}")
        assert output.endswith("checkpoint.pt to " + rf"{tmp_path}/run\udcff" + "\n")


@pytest.mark.parametrize("key", RANKS)
def test_a_run_whose_reader_leaves_has_saved_its_epoch_and_continues_after_it(key, tmp_path):
    """Rank 0 ends in one line; survive ends the other rank, too."""
    answers = train_two_epochs(key, tmp_path / "run", broken=BROKEN_STDOUT["closed"])
    status, output = answers[0]
    assert_one_line(output, "nobody reads the output any more: ", "--resume auto")
    assert status == 2
    assert key != "survive" or answers[1] == (2, "")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["epoch"] == 1
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    answers = train_two_epochs(key, tmp_path / "run", "--resume=auto")
    assert [status for status, _ in answers] == [0] * RANKS[key], answers
    assert "epoch 1/2" not in answers[0][1]
    assert "epoch 2/2" in answers[0][1], "the control: a stdout that works"
    assert (tmp_path / "run" / "metrics.jsonl").read_text().startswith(log)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 11))


def test_a_closed_stderr_is_no_traceback_either(tmp_path):
    """A pipe like `2>&1 | head -1` closes stderr, too."""
    both = BROKEN_STDOUT["closed"] + "os.dup2(1, 2)"
    assert train_two_epochs("01", tmp_path / "run", broken=both) == [(2, "")]
