"""The folder of a run: one run at a time writes into it, and no line of a log is ever lost."""

import fcntl
import os
import socket
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TextIO

from common.options import UsageError

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
    """Add lines to a log, of which a crash may have cut the last one."""
    with writing_to(path.parent), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write("".join(lines).encode())


def replace(path: Path, content: bytes | memoryview) -> None:
    """Give the file this content. A crash or a full disk leaves the old file, whole."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with writing_to(path.parent):
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def open_run_folder(args: Namespace, step: int) -> TextIO:
    """Lock --run-dir, and set aside the files of a run that this one does not resume.

    step: the last one of the checkpoint that was loaded; 0 without one, even for `--resume auto`.
    """
    folder = args.run_dir
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        of_this_folder = step and (
            args.resume == "auto" or folder.samefile(Path(args.resume).parent)
        )
        if not of_this_folder:
            set_aside(folder)
    return held


def lock(folder: Path) -> TextIO:
    """Refuse a folder that another run writes to. The lock ends when its file is closed."""
    file = (folder / ".lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no loader inherits it
    except BlockingIOError:
        file.seek(0)
        why = f"--run-dir {folder} is in use by {file.read() or 'another process'}"
        raise UsageError(f"{why}: wait until it has ended, or name another one") from None
    except OSError:  # this disk has no locks
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    for unfinished in folder.glob("*.*.tmp"):  # left by a process that was killed
        unfinished.unlink()
    return file


def set_aside(folder: Path) -> None:
    """Move the files of an older run to old1, or the next free number, where it can be resumed."""
    files = [folder / name for name in FILES if (folder / name).exists()]
    if files:
        old = next(path for n in count(1) if not (path := folder / f"old{n}").exists())
        old.mkdir()
        for file in files:
            file.replace(old / file.name)
