"""How does a script that asks for gloo come to use shm? Two functions of torch are replaced."""

import os
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch.distributed as dist

from shm.cores import pin
from shm.segment import SharingError


def exit_with_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def over_shm(function: Callable, pins: bool = False) -> Callable:
    """Return init_process_group or new_group, with shm where the program asks for gloo.

    pins: keep each rank to cores of its own once it has joined the first group.
    """
    makes_first_group = function.__name__ == "init_process_group"

    def join(*args: Any, **options: Any) -> Any:
        call = signature(function).bind(*args, **options)
        backend = call.arguments.get("backend")
        if (makes_first_group and backend is None) or backend in ("gloo", "cpu:gloo"):
            call.arguments["backend"] = "shm"
        elif "gloo" in (backend or ""):
            expected = "gloo or cpu:gloo, since shm has no other devices"
            exit_with_error(f"got backend {backend}, expected {expected}")
        try:
            group = function(*call.args, **call.kwargs)
        except SharingError as error:
            return exit_with_error(str(error))
        if makes_first_group and pins and dist.get_backend() == "shm":
            pin_and_say_so()
        return group

    return join


def pin_and_say_so() -> None:
    """Keep this rank to cores of its own; rank 0 prints how many if there are any."""
    cores = pin(dist.get_rank(), dist.get_world_size())
    if cores and dist.get_rank() == 0:
        text = f"{cores} of the {os.cpu_count()} cores; --no-pin changes that"
        print(f"shm: each rank keeps to {text}", file=sys.stderr)


def replace_gloo(pins: bool = False) -> None:
    """Let this process use shm wherever it asks torch for gloo, as `python -m shm` does."""
    # new_subgroups, for example, calls the functions of distributed_c10d
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = over_shm(module.init_process_group, pins)
        module.new_group = over_shm(module.new_group, pins)
