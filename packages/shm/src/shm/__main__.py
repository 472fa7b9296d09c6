"""Runs a script over shm where it asks for gloo, without changing it.

torchrun --standalone --nproc-per-node=2 -m shm 04_ddp_torchrun/train.py
"""

import os
import runpy
import sys
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
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


def over_shm(function: Callable, pins: bool = False) -> Callable:
    """init_process_group or new_group, with shm where the program asks for gloo."""
    begins = function.__name__ == "init_process_group"

    def join(*args: Any, **options: Any) -> Any:
        call = signature(function).bind(*args, **options)
        backend = call.arguments.get("backend")
        if (begins and backend is None) or backend in ("gloo", "cpu:gloo"):
            call.arguments["backend"] = "shm"
        elif "gloo" in (backend or ""):
            end(f"got backend {backend}, expected gloo or cpu:gloo, since shm has no other devices")
        try:
            group = function(*call.args, **call.kwargs)
        except SharingError as why:
            return end(str(why))
        if begins and pins and dist.get_backend() == "shm":
            each = pin(dist.get_rank(), dist.get_world_size())
            if each and dist.get_rank() == 0:
                cores = f"{each} of the {os.cpu_count()} cores"
                print(f"shm: each rank keeps to {cores}; --no-pin changes that", file=sys.stderr)
        return group

    return join


def pin(rank: int, ranks: int, process: int = 0) -> int:
    """Keep this rank on cores of its own; returns how many, 0 if that is not for us to decide.

    process: if not this one.

    Otherwise the scheduler likes to put ranks that wake each other on one core, where they wait in
    turns. It is left alone if the cores are not enough, or if somebody has chosen some of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if not each or len(cores) != os.cpu_count():
        return 0
    os.sched_setaffinity(process, cores[rank * each : (rank + 1) * each])
    return each


def replace_gloo(pins: bool = False) -> None:
    for module in (dist, dist.distributed_c10d):  # the second calls its own, as new_subgroups does
        module.init_process_group = over_shm(module.init_process_group, pins)
        module.new_group = over_shm(module.new_group, pins)


if __name__ == "__main__":
    parser = ArgumentParser("python -m shm", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--no-pin", action="store_false", dest="pins", help="ranks change cores")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("flags", metavar="FLAGS", nargs=REMAINDER, help="of the script")
    args = parser.parse_args()
    if not Path(args.script).is_file():
        end(f"{args.script} is no file: expected python -m shm SCRIPT FLAGS")
    replace_gloo(args.pins)
    sys.argv = [args.script, *args.flags]
    sys.path[0] = args.script.rpartition("/")[0]
    runpy.run_path(args.script, run_name="__main__")
