"""This machine: a new folder, and time that fits its load."""

import os
import tempfile
from functools import cache
from pathlib import Path


def timeout_under_load(seconds: float) -> float:
    """Lengthen a time limit by the load of the machine, so that only a hang reaches it."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="stages-", ignore_cleanup_errors=True)


def scratch_folder() -> Path:
    """Make a new folder, which is deleted when this process ends."""
    return Path(tempfile.mkdtemp(dir=_scratch().name))
