"""Runs a script over shm where it asks for gloo, without changing it.

torchrun --standalone --nproc-per-node=2 -m shm 04_ddp_torchrun/train.py
"""

import os
import runpy
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shm  # noqa: F401  # registers the backend, however this file is started
from shm.segment import SharingError


def end(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def over_shm(function: Callable) -> Callable:
    """init_process_group or new_group, with shm where the program asks for gloo."""

    def join(*args: Any, **options: Any) -> Any:
        call = signature(function).bind(*args, **options)
        backend = call.arguments.get("backend")
        is_default = backend is None and function.__name__ == "init_process_group"
        if is_default or backend in ("gloo", "cpu:gloo"):
            call.arguments["backend"] = "shm"
        elif "gloo" in (backend or ""):
            end(f"got backend {backend}, expected gloo or cpu:gloo, since shm has no other devices")
        try:
            return function(*call.args, **call.kwargs)
        except SharingError as why:
            return end(str(why))

    return join


def pin(rank: int, ranks: int) -> int:
    """Keep this rank on cores of its own; returns how many, 0 if there are not enough for all.

    Otherwise the scheduler likes to put ranks that wake each other on one core, in turns.
    """
    cores = sorted(os.sched_getaffinity(0))
    if each := len(cores) // ranks:
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])
    return each


def replace_gloo() -> None:
    for module in (dist, dist.distributed_c10d):  # the second calls its own, as new_subgroups does
        module.init_process_group = over_shm(module.init_process_group)
        module.new_group = over_shm(module.new_group)


if __name__ == "__main__":
    parser = ArgumentParser("python -m shm", "%(prog)s SCRIPT FLAGS", __doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("script", metavar="SCRIPT", help="and its own flags")
    script = parser.parse_args(sys.argv[1:2]).script
    if not Path(script).is_file():
        end(f"{script} is no file: expected python -m shm SCRIPT FLAGS")
    replace_gloo()
    sys.argv = sys.argv[1:]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
