"""The folder of a run: no file is half written, and nothing of two runs is mixed."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from common.options import UsageError

FILES = ("metrics.jsonl", "summary.json", "checkpoint.pt", "checkpoint.before.pt")


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in this block into a UsageError of one line that names --run-dir."""
    try:
        yield
    except OSError as error:
        why = f"cannot write to --run-dir {folder} ({error})"
        raise UsageError(f"{why}: make room, or name another one") from error


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Give the file this content. A crash or a full disk leaves the old file, whole."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with explain_write_errors(path.parent):
        unfinished.write_bytes(content)
        unfinished.replace(path)


def open_run_folder(args: Namespace, step: int) -> None:
    """Make --run-dir, and set aside the files of a run that this one does not resume.

    step: the last one of the checkpoint that was loaded; 0 without one, even for `--resume auto`.
    """
    folder = args.run_dir
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        of_this_folder = step and (
            args.resume == "auto" or folder.samefile(Path(args.resume).parent)
        )
        if not of_this_folder:
            set_aside(folder)


def set_aside(folder: Path) -> None:
    """Move the files of an older run to old1, or the next free number, where it can be resumed."""
    files = [folder / name for name in FILES if (folder / name).exists()]
    if files:
        old = next(path for n in count(1) if not (path := folder / f"old{n}").exists())
        old.mkdir()
        for file in files:
            file.replace(old / file.name)
