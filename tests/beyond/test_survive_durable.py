"""durable.py: whatever kills a save or damages a file, a whole checkpoint is left and is found.

And saving and checking cost no more reading and memory than the page says.
"""

import os
import re
import signal
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import durable
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module

MEGABYTE = 2**20


def save(path: Path, step: int, module=durable) -> None:
    with module.replacing(path) as file:
        torch.save({"step": step}, file)


def step_of(path: Path | None) -> int | None:
    return torch.load(path, weights_only=True)["step"] if path else None


@pytest.fixture
def two(tmp_path) -> Path:
    """The path of a checkpoint of step 2, which has replaced one of step 1."""
    for step in (1, 2):
        save(tmp_path / "checkpoint.pt", step)
    return tmp_path / "checkpoint.pt"


def save_and_die(path: Path, module, number: int) -> bool:
    """Save step 3 in a process that gets SIGKILL before it runs the last of so many new lines of
    the module; whether it was killed before it was done."""
    seen = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line" and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    child = os.fork()
    if child == 0:
        sys.settrace(trace)
        try:
            save(path, 3, module)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def newest_step(path: Path) -> int | None:
    try:
        return step_of(durable.newest_whole(path))
    except durable.CheckpointError:
        return None


CHECK = "    if (path in SAVED_HERE and path.exists()) or is_whole(path):\n"
UNCHECKED = ("durable.py", CHECK, "    if path.exists():\n")
KILLS = {  # saves before, whether by this process, whether the last is damaged; the steps left
    "the first save": (0, True, False, [None, 3]),
    "after a save of this process": (2, True, False, [2, 3]),
    "after a save of another process": (2, False, False, [2, 3]),
    "after a checkpoint that is damaged": (2, False, True, [1, 3]),
    "the same, but nobody checks it": (2, False, True, [1, None, 3]),  # the control
}


@pytest.mark.parametrize("case", KILLS)
def test_a_kill_in_any_line_of_a_save_leaves_a_whole_checkpoint(case, tmp_path, monkeypatch):
    """A damaged one must not replace the good one before it."""
    monkeypatch.setattr(os, "fsync", id)  # it outlasts a power cut, not a kill, and takes its time
    saves_before, same_process, damaged, expected = KILLS[case]
    changes = (UNCHECKED,) if "nobody" in case else ()
    module = fresh_module(LESSON_FOLDERS["survive"] / "durable.py", changes)
    steps, killed = [], True
    while killed:
        path = tmp_path / str(len(steps)) / "checkpoint.pt"
        path.parent.mkdir()
        for step in range(1, saves_before + 1):
            save(path, step, module if same_process else durable)
        if damaged:
            path.write_bytes(path.read_bytes()[:-100])
        killed = save_and_die(path, module, len(steps) + 1)
        steps.append(newest_step(path))
    assert len(steps) >= 15
    assert list(dict.fromkeys(steps)) == expected


def test_a_checkpoint_that_was_cut_anywhere_or_lost_a_bit_is_whole_or_is_not_taken(two):
    """A kill in the middle of writing leaves such a file. torch reads what is taken."""
    whole = two.read_bytes()
    end = whole.rindex(durable.MARK)
    digest = end + len(durable.MARK)
    for size in (0, 1, end // 2, end - 1, end, end + 1, digest, len(whole) - 1, len(whole)):
        two.write_bytes(whole[:size])
        assert step_of(durable.newest_whole(two)) == (1 if size < end else 2), size
    for place in (*range(0, end, 7), *range(end, len(whole))):
        flipped = whole[place] ^ (1 << place % 8)
        two.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        assert durable.is_whole(two) == (end <= place < digest), place


def test_a_save_that_fails_leaves_only_the_checkpoint_before(two):
    """The disk is full. What is saved has reached the file when its bytes are sent to the disk."""
    synced = []
    with patch("os.fsync", lambda file: synced.append(os.fstat(file).st_size)):
        save(two, 3)
    assert synced == [two.stat().st_size]
    error = rf"cannot write {two} \(no room\), the one before is whol"
    no_room = patch("os.fsync", side_effect=OSError("no room"))
    with no_room, pytest.raises(durable.CheckpointError, match=error):
        save(two, 4)
    assert [(path.name, step_of(path)) for path in two.parent.iterdir()] == [
        ("checkpoint.before.pt", 3)
    ]


FAILS = {  # saves before, whether the last is then damaged; what the line says, the steps left
    "the first save": (0, False, "there is no whole one before: make room, then start again", []),
    "after a checkpoint that is damaged": (1, True, "there is no whole one before", ["damaged"]),
    "the same, with one before": (2, True, "the one before is whole", [1, "damaged"]),
}


@pytest.mark.parametrize(("saves", "damaged", "error", "left"), FAILS.values(), ids=FAILS)
@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.open", "pathlib.Path.replace"])
def test_a_save_that_fails_says_what_is_left_and_deletes_nothing(
    failing, saves, damaged, error, left, tmp_path
):
    """Even a damaged checkpoint may be all that somebody has."""
    path = tmp_path / "checkpoint.pt"
    of_another_process = fresh_module(LESSON_FOLDERS["survive"] / "durable.py")
    for step in range(1, saves + 1):
        save(path, step, of_another_process)
    if damaged:
        path.write_bytes(b"junk")
    opened = Path.open

    def only_read(file: Path, mode: str = "r"):
        if "w" in mode:
            raise OSError("no room")
        return opened(file, mode)

    how = {"new": only_read} if failing.endswith("open") else {"side_effect": OSError("no room")}
    with patch(failing, **how), pytest.raises(durable.CheckpointError, match=error):
        save(path, 4)
    files = sorted(tmp_path.iterdir())
    assert ["damaged" if file.read_bytes() == b"junk" else step_of(file) for file in files] == left


def read_bytes(function, *args: object) -> int:
    """What this process reads from files in the meantime, from the disk or from its cache."""

    def count() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    before = count()
    function(*args)
    return count() - before


def peak_bytes(function, *args: object) -> int:
    """What this process allocates in Python at most in the meantime."""
    tracemalloc.start()
    try:
        function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sealed", [True, False])
def test_a_check_reads_a_file_once_and_holds_a_small_part_of_it(sealed, tmp_path):
    """The control holds and reads twice the file, as the check once did."""
    path, state = tmp_path / "checkpoint.pt", {"weights": torch.ones(4 * MEGABYTE)}
    if sealed:
        with durable.replacing(path) as file:
            torch.save(state, file)
    else:
        torch.save(state, path)
    size = path.stat().st_size
    assert durable.is_whole(path)
    assert size <= read_bytes(durable.is_whole, path) < size + MEGABYTE
    assert peak_bytes(durable.is_whole, path) < 4 * MEGABYTE < size

    def control() -> bytes:
        return path.read_bytes() + path.read_bytes()

    assert read_bytes(control) > 2 * size
    assert peak_bytes(control) > 2 * size


def test_a_save_reads_nothing_unless_another_process_has_saved_before(tmp_path):
    """Neither the checkpoint before nor the new one. The control: who did not save must read."""
    path, state = tmp_path / "checkpoint.pt", {"weights": torch.ones(2 * MEGABYTE)}

    def save_large(module) -> None:
        with module.replacing(path) as file:
            torch.save(state, file)

    save_large(durable)
    size = path.stat().st_size
    assert read_bytes(save_large, durable) < MEGABYTE
    of_another_process = fresh_module(LESSON_FOLDERS["survive"] / "durable.py")
    assert size < read_bytes(save_large, of_another_process) < size + MEGABYTE
    assert durable.is_whole(path)
