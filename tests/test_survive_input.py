"""survive/: a wrong call ends all ranks with status 2, and one of them tells why in one line."""

import hashlib
import socket
from pathlib import Path

import pytest
import torch
from support import ROOT, chapter, command, free_port, load_stage, run_main, run_ranks, train_once
from test_bad_input import SHORT, launcher, refused

SCRIPT = "survive/train.py"
durable = chapter("survive", "durable")


def together(answers: list[tuple[int, str]], *words: str) -> None:
    """All ranks end with status 2; one of them prints one line, with all these words."""
    assert [status for status, _ in answers] == [2] * len(answers), answers
    refused("".join(output for _, output in answers), *words)


CALLS = [  # how many ranks, with which flags
    (2, "--batch-size=61", ("--batch-size 61 does not divide by 2", "try 62")),
    (2, "--data-dir=nowhere", ("--data-dir nowhere",)),
    (2, "--resume=nowhere.pt", ("nowhere.pt is missing",)),
    (2, "--run-dir=LICENSE", ("cannot write to --run-dir",)),  # only rank 0 finds that
    (2, "--model=resnet18 --batch-size=2 --no-sync-bn", ("BatchNorm in resnet18",)),
    (1, "--checkpoint-every-steps=0", ("--checkpoint-every-steps", "'0'", "at least 1")),
    (1, "--timeout-seconds=0", ("--timeout-seconds", "'0'", "at least 1")),
    (1, "--amp=fp8", ("--amp", "'fp8'", "bf16")),
    (1, "--accumulate=7", ("--batch-size 120 does not divide by 7", "try 126")),
    (1, "--accumulate=0", ("--accumulate", "'0'", "at least 1")),
    (1, "--clip-norm=0", ("--clip-norm", "'0'")),
    (1, "--sync-bn=False", ("--sync-bn", "False")),
]


@pytest.mark.parametrize(("ranks", "flags", "words"), CALLS)
def test_all_ranks_end_together_and_one_tells_why(ranks, flags, words, tmp_path):
    call = ("--device=cpu", f"--run-dir={tmp_path / 'run'}", *flags.split())
    env = launcher(free_port()) if ranks == 2 else {}
    together(command(SCRIPT, *call, ranks=ranks, env=env), *words)
    assert not (tmp_path / "run").exists()


def _own_folder(rank: int, folder: Path) -> str:
    """As on two machines without a shared disk."""
    flags = (f"--data-dir={ROOT / 'data'}", f"--run-dir={folder / str(rank)}", "--resume=auto")
    with pytest.raises((ValueError, SystemExit)) as caught:
        run_main(load_stage("survive"), rank, "--device=cpu", *flags)
    return str(caught.value)


def test_a_checkpoint_that_only_one_rank_has_ends_both(tmp_path):
    command(SCRIPT, "--device=cpu", "--max-steps=2", f"--run-dir={tmp_path / '0'}")
    before = (tmp_path / "0" / "metrics.jsonl").read_text()
    told = ["2", "the step to resume from is 0 on rank 1, 2 on rank 0"]
    assert run_ranks(2, _own_folder, tmp_path) == told
    assert (tmp_path / "0" / "metrics.jsonl").read_text() == before, "nothing is lost"


@pytest.mark.parametrize(("rank", "busy"), [("0", True), ("0", False), ("1", False)])
def test_a_rendezvous_without_an_answer_ends_in_time(rank, busy):
    """The port is in use; or rank 1 never comes; or nobody listens. 600 s are the default."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if busy else free_port()
        env = {**launcher(port), "RANK": rank, "LOCAL_RANK": rank}
        [(status, output)] = command(SCRIPT, "--timeout-seconds=2", env=env, seconds=30)
    assert (status, "Traceback" in output) == (2, False), output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"2 ranks did not meet at 127.0.0.1:{port} (" in line
    assert all(word in line for word in ("rank 0's host", "port free and open", "all ranks start"))


def seal(path: Path) -> None:
    """Give a file the checksum that ours end with, as an attacker would."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes() + durable.MARK + digest.encode())


@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
@pytest.mark.parametrize(
    ("kind", "model", "words"),
    [
        ("flipped", "net-bn", ["damaged"]),
        ("another file", "net-bn", ["cannot load"]),
        ("good", "net", ["was saved with --model net-bn"]),
        ("good", "net-bn", []),  # the control
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(kind, model, words, how, tmp_path):
    """One that is malicious, too: tests/test_safety.py."""
    path, flags = tmp_path / "checkpoint.pt", (*SHORT, f"--model={model}", "--device=cpu")
    good = train_once("survive", 1, *SHORT, dtype=torch.float32).folder / "checkpoint.pt"
    content = bytearray(good.read_bytes())
    content[len(content) // 2] ^= kind == "flipped"  # in the middle of the weights
    path.write_bytes(content)
    if kind == "another file":
        torch.save([1, 2, 3], path)
        seal(path)
    answers = command(SCRIPT, *flags, f"{how}={path}", f"--run-dir={tmp_path / 'run'}")
    if words:
        together(answers, "checkpoint.pt", *words)
        assert not (tmp_path / "run").exists()
    else:
        said = "nothing to train" if how == "--resume" else "test accuracy"
        assert (answers[0][0], said in answers[0][1]) == (0, True), answers
