"""The folder of a run: no file half written, and nothing of an older run in it."""

import json

import pytest

from common.run_folder import set_aside
from helpers.refusals import SCRIPTS, assert_one_line
from helpers.small_data import few_digits
from helpers.small_disk import CANNOT_MOUNT, fill, small_disk
from local_ranks.run_files import read_metrics
from local_ranks.scripts import run_script
from local_ranks.train_stage import FP32, ONE_EPOCH, train

FIVE_STEPS = (*few_digits(), *ONE_EPOCH)  # an epoch has 5 steps


# The log


DAMAGED = {
    "cut off": b'{"epoch": 1, "st',
    "never written before a power cut": bytes(50),
    "no text": b"\xff\n",
    "no step": b"{}\n",
    "no object": b"17",
    "another step": b'{"step": "one"}',
}


def metrics_lines(*steps: int) -> str:
    return "".join(f'{{"step": {step}}}\n' for step in steps)


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_left_out(damage, tmp_path):
    content = metrics_lines(1, 2).encode() + damage + b"\n" + metrics_lines(3).encode()
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert read_metrics(tmp_path) == [{"step": step} for step in (1, 2, 3)]


def test_a_run_that_is_writing_has_the_lines_that_are_whole(tmp_path):
    assert read_metrics(tmp_path) == [], "it has not begun"
    text = metrics_lines(1, 2)
    for size in range(len(text) + 1):
        (tmp_path / "metrics.jsonl").write_text(text[:size])
        assert len(read_metrics(tmp_path)) == text[:size].count("}")


def test_a_resumed_step_replaces_its_older_lines_and_those_after_it(tmp_path):
    """A run of 6 steps was resumed after its step 3, took two steps, and was resumed once more."""
    steps = (1, 2, 3, 4, 5, 6, 4, 5, 6, 7)
    lines = [{"step": step, "line": number} for number, step in enumerate(steps)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_metrics(tmp_path) == [*lines[:3], *lines[6:]]
    (tmp_path / "metrics.jsonl").write_text(text + metrics_lines(5))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.fixture
def log(tmp_path):
    """What the log of a run in this folder is, and that it has kept each of its bytes."""
    seen = []

    def grown(name: str = "metrics.jsonl") -> list[int]:
        content = (tmp_path / name).read_bytes()
        assert all(content.startswith(before) for before in seen)
        seen.append(content)
        return [line["step"] for line in read_metrics((tmp_path / name).parent)]

    return grown


def test_resuming_only_adds_to_a_log(tmp_path, log):
    train("01", 1, *FIVE_STEPS, folder=tmp_path)
    assert log() == list(range(1, 6))
    train("01", 1, *FIVE_STEPS, "--epochs=2", "--resume=auto", folder=tmp_path)
    assert log() == list(range(1, 11))


def test_a_run_that_ends_before_it_saves_takes_nothing_from_the_log(tmp_path, log):
    """A run from the checkpoint before meets a loss of nan; then the last one is resumed."""
    flags = (*FIVE_STEPS, "--checkpoint-every-steps=3")
    train("survive", 1, *flags, **FP32, folder=tmp_path)
    assert log() == [1, 2, 3, 4, 5]
    before = f"--resume={tmp_path / 'checkpoint.before.pt'}"
    own_flags = (*flags, "--device=cpu", f"--run-dir={tmp_path}")
    [(status, output)] = run_script(SCRIPTS["survive"], *own_flags, before, "--lr=1e30")
    assert (status, "nan" in output) == (2, True), output
    assert log() == [1, 2, 3, 4, 5]
    run = train("survive", 1, *flags, "--epochs=2", "--resume=auto", **FP32, folder=tmp_path)
    assert "step 5, saved by" in run.output
    assert log() == list(range(1, 11))


# Old runs, and a full disk


def test_a_new_run_in_a_folder_mixes_nothing_with_the_one_before(tmp_path):
    """Which is kept and can be resumed. The control: a run that is resumed keeps its own."""
    first = train("survive", 1, *FIVE_STEPS, **FP32, folder=tmp_path)
    train("survive", 1, *FIVE_STEPS, "--epochs=2", "--resume=auto", **FP32, folder=tmp_path)
    assert not (tmp_path / "old1").exists()
    weights = first.checkpoint["model"]["fc2.bias"]
    second = train("survive", 1, *FIVE_STEPS, "--seed=5", **FP32, folder=tmp_path)
    assert [line["step"] for line in second.metrics] == list(range(1, 6))
    assert not weights.equal(second.checkpoint["model"]["fc2.bias"])
    assert not (tmp_path / "checkpoint.before.pt").exists()
    old = train(
        "survive", 1, *FIVE_STEPS, "--epochs=3", "--resume=auto", **FP32, folder=tmp_path / "old1"
    )
    assert [line["step"] for line in old.metrics] == list(range(1, 16))
    (tmp_path / "checkpoint.pt").unlink()  # as if the second had ended before its first checkpoint
    set_aside(tmp_path)
    assert {path.name for path in (tmp_path / "old2").iterdir()} == {
        "metrics.jsonl",
        "summary.json",
    }


@pytest.fixture
def full_disk():
    with small_disk() as folder:
        if not folder:
            pytest.skip(CANNOT_MOUNT)
        yield folder


def test_a_full_disk_ends_stage_01_in_one_line_and_the_old_checkpoint_stays(full_disk):
    """A small checkpoint fits at first; then the disk is full to the last byte."""
    run_dir = full_disk / "run"
    flags = ("--device=cpu", "--model=net", f"--run-dir={run_dir}")
    [(status, output)] = run_script(SCRIPTS["01"], *flags, "--max-steps=5")
    assert status == 0, output
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    fill(full_disk)
    [(status, output)] = run_script(SCRIPTS["01"], *flags, "--epochs=1")
    assert status == 2
    assert_one_line(output.splitlines()[-1], "cannot write to --run-dir", "No space left on device")
    assert "Traceback" not in output
    left = {path.name: path.read_bytes() for path in (run_dir / "old1").iterdir()}
    assert left == before
