"""The folder of a run: one run at a time writes into it, and a full disk ends it in one line."""

import fcntl
import json
import os
import socket
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TextIO

from common.options import UsageError

locks: list[TextIO] = []  # of this process
FILES = ("metrics.jsonl", "summary.json", "checkpoint.pt", "checkpoint.before.pt")


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Where all files of a run are written: what the disk refuses ends the run in one line."""
    try:
        yield
    except OSError as error:
        why = f"cannot write to --run-dir {folder} ({error})"
        raise UsageError(f"{why}: make room, or name another one") from error


def append(path: Path, lines: Iterable[str]) -> None:
    with writing_to(path.parent), path.open("a") as file:
        file.writelines(lines)


def replace(path: Path, content: bytes | memoryview) -> None:
    """Give the file this content. A crash or a full disk leaves the old file, whole."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with writing_to(path.parent):
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def open_run_folder(args: Namespace, step: int) -> None:
    """Lock --run-dir, and keep the steps of a run that this one resumes, or set its files aside."""
    folder = args.run_dir
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
        if args.resume == "auto" or (args.resume and folder.samefile(Path(args.resume).parent)):
            keep_steps(folder / "metrics.jsonl", step)
        else:
            set_aside(folder)


def lock(folder: Path) -> None:
    """Refuse a folder that another run writes to; else keep it until this process has ended."""
    file = (folder / ".lock").open("a+")
    locks.append(file)  # to close it would end the lock
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no loader inherits it
    except BlockingIOError:
        file.seek(0)
        why = f"--run-dir {folder} is in use by {file.read() or 'another process'}"
        raise UsageError(f"{why}: wait until it has ended, or name another one") from None
    except OSError:  # this disk has no locks
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    for unfinished in folder.glob("*.*.tmp"):  # of a process that was killed
        unfinished.unlink()


def keep_steps(metrics: Path, last: int) -> None:
    """Keep the lines up to this step, that of the checkpoint. A crash may have damaged some."""
    lines = metrics.read_text(errors="replace").splitlines() if metrics.exists() else []
    good_lines, damaged = [], 0
    for line in lines:
        try:
            if json.loads(line)["step"] <= last:
                good_lines.append(f"{line}\n")
        except (ValueError, TypeError, LookupError):
            damaged += 1
    if damaged:
        print(f"{metrics}: left out {damaged} damaged line{'s' * (damaged > 1)}")
    if lines:
        replace(metrics, "".join(good_lines).encode())


def set_aside(folder: Path) -> None:
    """Move the files of an older run to old1, or the next free number, where it can be resumed."""
    files = [folder / name for name in FILES if (folder / name).exists()]
    if files:
        old = next(path for n in count(1) if not (path := folder / f"old{n}").exists())
        old.mkdir()
        for file in files:
            file.replace(old / file.name)
