"""survive/: a wrong call ends all ranks with status 2, and one of them tells why in one line."""

import hashlib
import shutil
import socket
from pathlib import Path

import pytest
import torch
from support import ROOT, chapter, command, free_port, train_once
from test_bad_input import SHORT, Trap, launcher, refused

SCRIPT = "survive/train.py"
durable = chapter("survive", "durable")


def together(answers: list[tuple[int, str]], *words: str) -> None:
    """All ranks end with status 2; one of them prints one line, with all these words."""
    assert [status for status, _ in answers] == [2] * len(answers), answers
    refused("".join(output for _, output in answers), *words)


ON_ALL_RANKS = [
    (("--batch-size=61",), ("--batch-size 61 does not divide by 2", "try 62")),
    (("--data-dir=nowhere",), ("--data-dir nowhere",)),
    (("--resume=nowhere.pt",), ("nowhere.pt is missing",)),
    (("--run-dir=LICENSE",), ("cannot write to --run-dir",)),  # only rank 0 finds that
    (("--model=resnet18", "--batch-size=2", "--no-sync-bn"), ("BatchNorm in resnet18",)),
]


@pytest.mark.parametrize(("flags", "words"), ON_ALL_RANKS, ids=lambda value: " ".join(value)[:30])
def test_all_ranks_end_together_and_one_tells_why(flags, words, tmp_path):
    run_dir = () if flags[0].startswith("--run-dir") else (f"--run-dir={tmp_path / 'run'}",)
    flags = ("--device=cpu", *run_dir, *flags)
    together(command(SCRIPT, *flags, ranks=2, env=launcher(free_port())), *words)
    assert not (tmp_path / "run").exists()


FLAGS = [
    ("--checkpoint-every-steps=0", ("--checkpoint-every-steps", "'0'", "at least 1")),
    ("--timeout-seconds=0", ("--timeout-seconds", "'0'", "at least 1")),
    ("--amp=fp8", ("--amp", "'fp8'", "bf16")),
    ("--accumulate=7", ("--batch-size 120 does not divide by 7", "try 126")),
    ("--sync-bn=False", ("--sync-bn", "False")),
]


@pytest.mark.parametrize(("flag", "words"), FLAGS)
def test_wrong_flags_are_refused(flag, words, tmp_path):
    together(command(SCRIPT, f"--run-dir={tmp_path / 'run'}", "--device=cpu", flag), *words)
    assert not (tmp_path / "run").exists()


def test_a_file_that_only_one_rank_lacks_ends_both(tmp_path):
    """The last rank reads another folder, as on a second machine that lacks the file."""
    good = train_once("01", 1, *SHORT, dtype=torch.float32).folder / "checkpoint.pt"
    (tmp_path / "0").mkdir()
    shutil.copy(good, tmp_path / "0" / "checkpoint.pt")
    script = tmp_path / "run.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'survive')!r})\n"
        f"sys.argv.append('--resume={tmp_path}/' + os.environ['RANK'] + '/checkpoint.pt')\n"
        f"runpy.run_path({str(ROOT / SCRIPT)!r}, run_name='__main__')\n"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("of an earlier run\n")
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path / 'run'}")
    answers = command(str(script), *flags, ranks=2, env=launcher(free_port()))
    assert [status for status, _ in answers] == [2, 2]
    errors = [x for _, output in answers for x in output.splitlines() if x.startswith("error: ")]
    assert len(errors) == 1
    assert "1/checkpoint.pt is missing" in errors[0]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "of an earlier run\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": None}, ("MASTER_ADDR", "--standalone")),
        ({"MASTER_PORT": "soon"}, ("MASTER_PORT is soon", "whole number")),
        ({"MASTER_PORT": "70000"}, ("MASTER_PORT is 70000", "free port")),
        ({"MASTER_PORT": "0"}, ("MASTER_PORT is 0", "free port")),
        ({"LOCAL_RANK": None}, ("LOCAL_RANK is not set",)),
        ({"RANK": "2"}, ("RANK is 2", "less than 2")),
    ],
    ids=["no-address", "port-text", "port-high", "port-zero", "missing", "rank-too-high"],
)
def test_half_a_launcher_is_refused(change, words):
    env = launcher(free_port()) | {name: value for name, value in change.items() if value}
    env = {name: value for name, value in env.items() if change.get(name, value)}
    together(command(SCRIPT, env=env), *words)


def test_srun_without_an_address_is_refused():
    env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    env |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    together(command(SCRIPT, env=env), "MASTER_PORT is not set, expected a whole number")


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        [(status, output)] = command(SCRIPT, env=launcher(port))
    assert status == 2
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert f"did not meet at 127.0.0.1:{port}" in lines[0]
    assert "Traceback" not in output


def test_a_rank_that_never_comes_is_waited_for_as_long_as_told():
    flags = ("--timeout-seconds=2", "--device=cpu")
    [(status, output)] = command(SCRIPT, *flags, env=launcher(free_port()))
    assert status == 2
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "2 ranks did not meet" in errors[0]


def seal(path: Path) -> None:
    """Give a file the checksum that ours end with, as an attacker would."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes() + durable.MARK + digest.encode())


def checkpoint(kind: str, folder: Path) -> Path:
    good = train_once("survive", 1, *SHORT, dtype=torch.float32).folder / "checkpoint.pt"
    path = folder / "checkpoint.pt"
    if kind == "truncated":
        path.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind.startswith("pickled-object"):
        torch.save({"model": Trap(folder / "trapped")}, path)
        if kind.endswith("with-checksum"):
            seal(path)
    elif kind == "one-bit-flipped":
        content = bytearray(good.read_bytes())
        content[len(content) // 2] ^= 1  # in the middle of the weights
        path.write_bytes(content)
    elif kind == "another-file":
        torch.save([1, 2, 3], path)
        seal(path)
    else:
        shutil.copy(good, path)
    return path


CHECKPOINTS = [
    ("truncated", (), ("damaged",)),
    ("empty", (), ("damaged",)),
    ("one-bit-flipped", (), ("damaged",)),
    ("pickled-object", (), ("no checkpoint",)),
    ("pickled-object-with-checksum", (), ("is not a checkpoint", "more than plain values")),
    ("another-file", (), ("cannot load",)),
    ("good", ("--model=net",), ("was saved with --model net-bn",)),
]


@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
@pytest.mark.parametrize(("kind", "flags", "words"), CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused(kind, flags, words, how, tmp_path):
    path = checkpoint(kind, tmp_path)
    call = (*SHORT, *flags, f"{how}={path}", f"--run-dir={tmp_path / 'run'}", "--device=cpu")
    together(command(SCRIPT, *call), "checkpoint.pt", *words)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "trapped").exists(), "loading ran code"


def test_a_good_checkpoint_is_evaluated(tmp_path):
    """The control of the test above."""
    path = checkpoint("good", tmp_path)
    [(status, output)] = command(SCRIPT, *SHORT, f"--evaluate={path}", "--device=cpu")
    assert status == 0, output
    assert "test accuracy" in output
