"""Compiles fast.c on first use, if this machine has a compiler, and calls it."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from typing import Any

import torch
from torch import Tensor

from shm import segment

SOURCE = Path(__file__).with_name("fast.c")
COMPILER = (os.environ.get("CC") or "cc").split()
COMPILER_TIMEOUT = 60  # seconds; it needs one
NOT_LOADED = (OSError, ValueError, AttributeError)  # from loading a file that is not this library
NUMBER_OF_DTYPE = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
DONE, DIFFERS = -1, -2  # what all_reduce returns; otherwise it returns the awaited rank
MAX_RANKS = 64
SPINS_PER_YIELD = 200  # C looks so often, some µs, before another program may have the core
COUNTERS = segment.CACHE_LINES_PER_RANK * segment.COUNTERS_PER_CACHE_LINE  # counters of a rank
CONSTANTS = {name: getattr(segment, name) for name in ("ARRIVED", "CALL", "TRANSFER", "BELL")}
CONSTANTS |= {"ASLEEP": segment.ASLEEP, "COUNTERS": COUNTERS}
CONSTANTS |= {"MAX_RANKS": MAX_RANKS, "SPINS_PER_YIELD": SPINS_PER_YIELD}
CONSTANTS |= {"DONE": DONE, "DIFFERS": DIFFERS}
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC"]
FLAGS += [f"-D{name}={value}" for name, value in CONSTANTS.items()]


POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS_OF_FUNCTION = {
    "put": [POINTER, POINTER, NUMBER],
    "all_reduce": [POINTER, NUMBER],
    "read_and_write": [POINTER, NUMBER, ctypes.c_float, NUMBER],
    "copy": [POINTER, POINTER, NUMBER, NUMBER],
    "exchange_line": [POINTER, NUMBER, NUMBER],
}


class SumState(ctypes.Structure):
    """How far a sum has come, as in fast.c."""

    _fields_ = [("counters", ctypes.c_void_p), ("slots", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("rank", "ranks", "row_bytes", "sliced")]
    _fields_ += [(name, ctypes.c_int64) for name in ("arrivals", "pieces")]
    _fields_ += [("tensor", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("size", "dtype", "root", "call", "transfer")]
    _fields_ += [(name, ctypes.c_int64) for name in ("start", "next")]


def cpu_features() -> Iterator[str]:
    """Yield what -march=native depends on: machines that share a home directory may differ."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "flags", "Features", "isa")):
            yield line


class CompileError(Exception):
    """There is no compiled code. The text says why."""


def compile_to(path: Path) -> None:
    """Compile fast.c. Raises CompileError."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    command = [*COMPILER, *FLAGS, "-o", str(unfinished), str(SOURCE)]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILER_TIMEOUT
        )
    except FileNotFoundError:
        what = f"got no compiler {COMPILER[0]}, expected one: install gcc, or set CC"
        raise CompileError(what) from None
    except subprocess.TimeoutExpired:
        raise CompileError(f"{COMPILER[0]} has not ended after {COMPILER_TIMEOUT} s") from None
    except subprocess.CalledProcessError as error:
        raise CompileError(error.stderr.strip()) from None
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())  # otherwise a power cut could leave a part of it
    unfinished.replace(path)  # atomic, since the other ranks do the same now


def cache_folder() -> Path | None:
    """Return the user's folder for compiled code; None if others may write to it."""
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch-shm")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except (OSError, RuntimeError):  # there is no home directory, or it is not writable
        return None
    if status.st_uid == os.geteuid() and not status.st_mode & (S_IWGRP | S_IWOTH):
        return path
    what = f"others may write to {path}, expected a folder of this user alone"
    warnings.warn(f"shm: {what}: so each process compiles {SOURCE.name} anew", stacklevel=2)
    return None


def load_functions(path: Path) -> Any:
    """Load compiled code. Raises one of NOT_LOADED if it does not come from fast.c."""
    functions = ctypes.CDLL(str(path))
    size = ctypes.c_int64.in_dll(functions, "size_of_state").value
    if size != ctypes.sizeof(SumState):
        raise ValueError("fast.c and fast.py have another SumState each")
    for name, arguments in ARGUMENTS_OF_FUNCTION.items():
        getattr(functions, name).argtypes = arguments
        getattr(functions, name).restype = ctypes.c_int64
    functions.put.restype = None
    return functions


@cache
def library() -> Any:
    """Return the compiled functions; None, with a warning, if there are none.

    Then Python does it all. A file in the cache is named for what was compiled.
    """
    try:
        key = [*COMPILER, *FLAGS, SOURCE.read_text(), *sorted(set(cpu_features()))]
        name = hashlib.sha256("\n".join(key).encode()).hexdigest()[:32]
        with tempfile.TemporaryDirectory() as temporary:
            path = (cache_folder() or Path(temporary)) / f"{name}.so"
            with suppress(*NOT_LOADED):
                return load_functions(path)
            compile_to(path)
            return load_functions(path)
    except (CompileError, *NOT_LOADED) as error:
        text = f"shm: {SOURCE.name} cannot be compiled, so Python adds up, which is slower: {error}"
        warnings.warn(text, stacklevel=2)
        return None


def put(target: Tensor, source: Tensor) -> None:
    """Copy into shared memory, where other ranks read soon.

    target: without gaps. source: as flat() returns it, so its memory holds its numbers.
    """
    functions = library()
    if functions and source.is_contiguous():
        functions.put(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)
