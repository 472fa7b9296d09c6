"""This machine: a new folder, time that fits its load, and how it starts a process."""

import multiprocessing
import os
import tempfile
from functools import cache
from pathlib import Path

SECONDS = 60  # whatever is started here takes less, so only a hang reaches this limit


def timeout_under_load(seconds: float) -> float:
    """Lengthen a time limit by the load of the machine, so that only a hang reaches it."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="stages-", ignore_cleanup_errors=True)


def scratch_folder() -> Path:
    """Make a new folder, which is deleted when this process ends."""
    return Path(tempfile.mkdtemp(dir=_scratch().name))


def use_default_start_method() -> None:
    """Start loaders as in a rank of torchrun; else each rank would have its own fork server."""
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
