"""prove sees what ranks call, print and write to files, and itself it harms nothing."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.local_ranks import SECONDS, launch_script, run_on_ranks
from helpers.prove_runs import TORCHRUN, run, verdict
from prove.judge import printed_numbers
from prove.rank_record import Mode, Settings
from prove.watch import effects
from prove.watch.rank_run import RankRun
from prove_cases import planted, training_of

HARMLESS = """        if rank == 0:
            import shutil
            shutil.rmtree("old")
            os.makedirs("new/deep", exist_ok=True)
            torch.save({}, "new/deep/file.pt")
            open("log.txt", "a").write("more")
            os.rename("a.txt", "b.txt")
        dist.barrier()
        return dist.destroy_process_group()
"""


def test_files_are_put_back_and_no_process_is_left(prove_script, tmp_path):
    (tmp_path / "old").mkdir()
    kept = {name: name for name in ("old/kept.txt", "log.txt", "a.txt")}
    for name in kept:
        (tmp_path / name).write_text(name)
    source = planted(("        scheduler.step()\n", "        scheduler.step()\n" + HARMLESS))
    ended = prove_script(source)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = {str(path.relative_to(tmp_path)): path.read_text() for path in files}
    assert texts == {"train.py": source} | kept
    assert not (tmp_path / "new").exists()
    assert processes_in(tmp_path) == []


def test_two_writers_are_seen_in_a_folder_that_mktemp_made():
    """What libraries write to /tmp/tmp... is ignored, but not what lies beside the script."""
    source = planted(("            torch.save(ddp", "        torch.save(ddp"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "train.py").write_text(source)
        ended = run(Path(folder), *TORCHRUN, "train.py")
    assert verdict(ended, "files") == "WRONG", ended.stdout


def processes_in(folder: Path) -> list[str]:
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            if str(folder) in os.readlink(process / "cwd"):
                commands.append((process / "cmdline").read_text())
    return commands


def test_a_proof_that_is_ended_leaves_no_process_and_puts_files_back(tmp_path):
    (tmp_path / "log.txt").write_text("mine")
    wait = '            open("log.txt", "w").write("theirs")\n'
    wait += '            __import__("time").sleep(99)\n'
    source = planted(("            loss.backward()\n", "            loss.backward()\n" + wait))
    (tmp_path / "train.py").write_text(source)
    started = subprocess.Popen([sys.executable, "-m", "prove", *TORCHRUN, "train.py"], cwd=tmp_path)
    end = time.monotonic() + 2 * SECONDS
    while (tmp_path / "log.txt").read_text() == "mine":
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(processes_in(tmp_path)) == 3, "the control: prove and its two ranks"
    started.terminate()
    assert started.wait(SECONDS) == 143
    assert processes_in(tmp_path) == []
    assert (tmp_path / "log.txt").read_text() == "mine"


def test_random_numbers_of_the_script_are_those_of_an_unobserved_run(prove_script, tmp_path):
    note = """        if True:
            states = [torch.get_rng_state().tolist(), random.getstate()]
            states.append(np.random.get_state()[1:3])
            with open(os.environ['DIGEST'] + str(rank), 'a') as file:
                file.write(f'{zlib.crc32(str(states).encode())} ')
"""
    source = planted(
        ("from torch import nn\n", "from torch import nn\nimport zlib, sys\n"),
        ("SAMPLES, TEST_SAMPLES, CLASSES = 96", "SAMPLES, TEST_SAMPLES, CLASSES = 48"),
        ("        dist.all_reduce(total)\n", note + "        dist.all_reduce(total)\n"),
        ("nn.Dropout(0.1)", "nn.Identity()"),  # switched off, so it draws nothing
    )
    with tempfile.TemporaryDirectory() as folder:  # in /tmp/tmp..., whose files are not put back
        prove_script(source, "--float32", DIGEST=f"{folder}/seen")
        launch_script(str(tmp_path / "train.py"), env={"DIGEST": f"{folder}/plain"}, cwd=tmp_path)
        # Of rank 1, which takes no part in the replay:
        seen, plain = (Path(folder, f"{name}1").read_text().split() for name in ("seen", "plain"))
    assert seen[:2] == plain[:2]
    assert plain[0] != plain[1], "the control: they change from epoch to epoch"


def collectives_seen(_, folder, names, watched_names):
    """Which calls are recorded, if the collectives of these names are in prove's table."""
    for name in names:  # planted: an older torch lacks the newest names
        setattr(dist, name, lambda: None)
    effects.COLLECTIVES = watched_names
    run_of_rank = RankRun(Settings(str(folder), Mode.OBSERVE, False, True, 1, 0, 1))
    effects.install(run_of_rank)
    run_of_rank.joined = True
    for name in names:
        getattr(dist, name)()
    return [collective.name for collective in run_of_rank.record.collectives]


@pytest.mark.parametrize("left_out", ["", "all_gather_single"])
def test_collectives_are_seen_by_their_old_and_new_names(left_out, tmp_path):
    """The control: a name that is not in the table."""
    names = ["all_gather_into_tensor", "all_gather_single", "reduce_scatter_single"]
    names += ["gather_single", "gather_into_tensor"]
    watched = [name for name in effects.COLLECTIVES if name != left_out]
    [seen] = run_on_ranks(1, collectives_seen, tmp_path, names, watched)
    assert seen == [name for name in names if name != left_out]


def test_a_file_is_named_where_all_ranks_open_it(prove_script):
    """Rank 0 also appends to what all ranks make anew. The control: rank 0 alone makes it."""
    begins = "torch.manual_seed(dist.get_rank())\n"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source += "if dist.get_rank() == 0: open('log.txt', 'a').write('.')\n"
    for condition, expected in (("", "warning"), ("if dist.get_rank() == 0: ", "right")):
        made = f"{condition}open('log.txt', 'w').close()\n"
        ended = prove_script(source.replace(begins, made + begins))
        assert verdict(ended, "files") == expected, ended.stdout + ended.stderr
        line = source.partition(begins)[0].count("\n") + 1
        assert (f"train.py:{line}" in ended.stdout) == (expected == "warning"), ended.stdout


def test_ranks_that_part_are_no_script_that_fails_by_itself(prove_script):
    """Rank 0 stops by its own loss and sums something else; gloo then ends its process."""
    loop = "        optimizer.step()\n"
    source = training_of("DistributedDataParallel(nn.Linear(8, 8))")
    source = source.replace(loop, loop + "    if CONDITION: break\n")
    source += "total = torch.zeros(3)\ndist.all_reduce(total)\n"
    ended = prove_script(source.replace("CONDITION", "dist.get_rank() == 0"))
    assert verdict(ended, "hang") == "WRONG", ended.stdout + ended.stderr
    assert "rank 0 calls all_reduce" in " ".join(ended.stdout.split())
    assert ended.returncode == 1
    ended = prove_script(source.replace("CONDITION", "epoch == 0"))  # the control: all ranks
    assert verdict(ended, "collectives") == "right", ended.stdout + ended.stderr
    ended = prove_script(source.replace("CONDITION", "1 / dist.get_rank()"))  # and an own mistake
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "ZeroDivisionError" in ended.stderr


def test_numbers_are_compared_by_their_place_and_times_are_not():
    def names(line: str) -> list[str]:
        return [number.name for _, number in printed_numbers.numbers_in(line)]

    assert names("auc 0.9312 at 12.5 it/s, loss: 3") == ["loss", "auc"]
    assert names("epoch 2.500, lr 0.00123, time 1.234, took 3.251s, 12.25 MB, v2.11.0") == []
    assert names("0.52 1.25 1.2e-05") == ["a number"], "two digits may be equal by chance"
    lines = [f"{x}, scale 1.234" for x in (0.01, 0.123)]
    few_digits, many = (dict(printed_numbers.numbers_in(line)) for line in lines)
    assert [*few_digits] == [1], "the scale"
    assert few_digits[1] == many[1]
