"""Judge the answers of a class: a folder for each student, and a table of all that they handed in.

An answer is somebody else's program. Each is judged in processes of its own, which end with its
time limit, and nothing that it has started goes on after it.
"""

import csv
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common.options import UsageError
from judge_answer import PUZZLES, Puzzle, Verdict, cost, judge
from progress import Progress, read

SECONDS = 300  # time that an answer gets; the slowest right one takes a tenth of it
BECOME_REAPER = 36  # of prctl: processes without a parent become children of this one
fork: Any = multiprocessing.get_context("fork")
HEADS = ("who", "which", "verdict", "minutes", "cost, or what the judge says")


def grade(folders: list[Path], names: list[str], table: Path | None) -> int:
    """Print a row for each answer, and write them all to a table; return the exit status.

    names: of the puzzles that all had to solve; if there are none, whatever was handed in counts.
    """
    students = [folder for folder in folders if folder.is_dir()]
    for other in {*folders} - {*students}:
        print(f"{other} is no folder, so it is left out", file=sys.stderr)
    torch.set_num_threads(1)  # a process with a pool of threads must not fork
    adopt_orphans()
    width = max([len(folder.name) for folder in students], default=3)
    row = f"{{:{width}}}  {{:5}}  {{:8}}  {{:>7}}  {{}}"
    print(row.format(*HEADS))
    if table and not table.exists():
        append(table, HEADS)
    for folder in students:
        copies = where_copies_lie(folder)
        rows = []
        for puzzle in [PUZZLES[name] for name in names or PUZZLES]:
            if names or (copies / puzzle.folder).exists():
                rows.append((folder.name, puzzle.name, *judged(puzzle, copies)))
                append(table, rows[-1])
                print(row.format(*rows[-1]), flush=True)
        right = sum(cells[2] == "right" for cells in rows)
        print(f"{folder.name:{width}}  {right} of {len(rows)} right\n", flush=True)
    return 0


def judged(puzzle: Puzzle, copies: Path) -> tuple[str, str, str]:
    """The verdict, the minutes, and what there is to say."""
    copy = copies / puzzle.folder / "train.py"
    if not copy.parent.exists():
        return "missing", "", "not handed in"
    verdict = judge_apart(puzzle, copy)
    if not verdict.is_right:
        return "not yet", "", verdict.text
    text = verdict.text if puzzle.is_gap else cost(puzzle)
    return "right", minutes_of(copies, puzzle), text


def where_copies_lie(folder: Path) -> Path:
    """The folder itself, or runs/puzzles in it, if all of that was handed in."""
    logs = sorted(folder.rglob("progress.jsonl"), key=lambda log: len(log.parts))
    return logs[0].parent if logs else folder


def append(table: Path | None, cells: Iterable[str]) -> None:
    if table:
        with table.open("a", newline="") as file:
            csv.writer(file).writerow(cells)


def minutes_of(folder: Path, puzzle: Puzzle) -> str:
    with suppress(UsageError):  # a damaged log is the student's
        minutes = Progress(folder).minutes(puzzle.name)
        return "" if minutes is None else f"{minutes:.0f}"
    return "?"


def judge_apart(puzzle: Puzzle, copy: Path, seconds: float = SECONDS) -> Verdict:
    """Judge a copy in a process group of its own, and end all that it has started."""
    with tempfile.TemporaryDirectory(prefix="grade-") as name:
        file = Path(name, "verdict.json")
        process = fork.Process(target=write_verdict, args=(puzzle, copy, file))
        process.start()
        process.join(seconds)
        is_late = process.is_alive()
        if is_late:
            process.kill()
        process.join()
        end_orphans()
        if file.exists():
            return Verdict(*json.loads(file.read_text()))
    why = f"it has not ended within {seconds:.0f} s" if is_late else "the judge was ended"
    return Verdict(False, why)


def write_verdict(puzzle: Puzzle, copy: Path, file: Path) -> None:
    """Judge in this process, which has just been forked."""
    os.setsid()
    tempfile.tempdir = str(file.parent)  # deleted with all that an ended answer has left there
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # write to descriptors 1 and 2
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    try:
        verdict = judge(puzzle, read(copy))
    except (UsageError, OSError) as error:
        verdict = Verdict(False, str(error))
    except Exception as error:  # the other answers are judged all the same
        verdict = Verdict(False, f"the judge cannot read what it does: {error!r}")
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps(verdict))
    whole.rename(file)


def adopt_orphans() -> None:
    """Become the parent of whatever an answer leaves behind, so that it can be ended (Linux)."""
    with suppress(AttributeError):  # elsewhere, there is no prctl
        ctypes.CDLL(None).prctl(BECOME_REAPER, 1, 0, 0, 0)


def children() -> Iterable[int]:
    for thread in Path("/proc/self/task").glob("*/children"):
        yield from map(int, thread.read_text().split())


def end_orphans() -> None:
    """Kill all children, and then the ones that become children by that."""
    while pids := list(children()):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
