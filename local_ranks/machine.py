"""This machine: a new folder, time that fits its load, and how it starts a process."""

import ctypes
import multiprocessing
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

# Two variables of glibc, which let a program keep the memory that its tensors free, as torch's
# allocator does on a GPU. Without them it goes back to the system, and each new page costs a fault
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
PARAMETER_OF_MALLOPT = {"MALLOC_MMAP_MAX_": -4, "MALLOC_TRIM_THRESHOLD_": -1}  # see malloc.h
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


def set_malloc(variables: dict[str, str]) -> None:
    """Do what these variables do where a program starts, in a process that was only forked."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):  # musl has none
        for name, parameter in PARAMETER_OF_MALLOPT.items():
            if name in variables:
                libc.mallopt(parameter, int(variables[name]))
