"""Compiles fast.c on first use, if this machine has a compiler, and calls it."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shm import segment

SOURCE = Path(__file__).with_name("fast.c")
COMPILER = os.environ.get("CC", "cc").split()
NUMBER_OF_DTYPE = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
DONE, DIFFERS = -1, -2  # what all_reduce returns; or the rank that is awaited
MOST_RANKS = 64
LOOKS = 200  # at the others' arrivals before another program may have the core: some microseconds
COUNTERS = segment.CACHE_LINES_PER_RANK * segment.CACHE_LINE_BYTES // 8  # of a rank
CONSTANTS = {name: getattr(segment, name) for name in ("ARRIVED", "CALL", "TRANSFER", "BELL")}
CONSTANTS |= {"ASLEEP": segment.ASLEEP, "COUNTERS": COUNTERS}
CONSTANTS |= {"MOST_RANKS": MOST_RANKS, "LOOKS": LOOKS, "DONE": DONE, "DIFFERS": DIFFERS}
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC"]
FLAGS += [f"-D{name}={value}" for name, value in CONSTANTS.items()]


class SumState(ctypes.Structure):
    """How far a sum has come: see fast.c."""

    _fields_ = [("counters", ctypes.c_void_p), ("slots", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("rank", "ranks", "row_bytes", "sliced")]
    _fields_ += [(name, ctypes.c_int64) for name in ("arrivals", "pieces")]
    _fields_ += [("tensor", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("size", "dtype", "root", "call", "transfer")]
    _fields_ += [(name, ctypes.c_int64) for name in ("start", "next")]


def cpu_features() -> Iterator[str]:
    """What -march=native depends on: a home directory may be shared by different machines."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "flags", "Features", "isa")):
            yield line


@cache
def library() -> Any:
    """The compiled functions; None without a compiler, and then Python does it all."""
    try:
        key = "\n".join([*COMPILER, *FLAGS, SOURCE.read_text(), *sorted(set(cpu_features()))])
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch-shm")
        path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                compiled = Path(place, "fast.so")
                command = [*COMPILER, *FLAGS, "-o", str(compiled), str(SOURCE)]
                subprocess.run(command, check=True, capture_output=True, text=True)
                compiled.replace(path)  # at once, as the other ranks do the same
        functions = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        text = f"shm: {SOURCE.name} cannot be compiled, so Python adds up: {error.stderr.strip()}"
        warnings.warn(text, stacklevel=2)
        return None
    except (OSError, RuntimeError):
        return None
    size = ctypes.c_int64.in_dll(functions, "size_of_state").value
    assert size == ctypes.sizeof(SumState), "fast.c and fast.py have another SumState each"
    functions.put.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    functions.put.restype = None
    functions.all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    functions.all_reduce.restype = ctypes.c_int64
    return functions


def put(target: Tensor, source: Tensor) -> None:
    """Copy into shared memory, where other ranks read soon.

    target has no gaps, and source is as flat() returns it: its numbers are what lies in memory.
    """
    functions = library()
    if functions and source.is_contiguous():
        functions.put(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)
