"""Functions on ranks of this machine, and the bodies of tests.

run_on_ranks(2, function, argument)  # what function(rank, argument) returns on each of two

@on_ranks(2)                         # the body of the test runs on each of two
def test_ranks_agree(rank, flag): ...  # `flag` is a fixture or a parameter, as always
"""

import os
from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from pathlib import Path
from typing import Any

import torch.distributed as dist

from local_ranks.machine import (
    SECONDS,
    scratch_folder,
    timeout_under_load,
    use_default_start_method,
)
from local_ranks.ranks import run_ranks


def run_on_ranks(world_size: int, function: Callable, *args: Any, may_die: tuple = ()) -> list:
    """Return function(rank, *args) of each rank; the function joins the process group itself."""
    options: dict[str, Any] = {
        "backend": None,
        "seconds": timeout_under_load(SECONDS),
        "may_die": may_die,
    }
    return run_ranks(world_size, _run_function, function, args, **options)


def _run_function(rank: int, function: Callable, args: tuple) -> Any:
    use_default_start_method()
    return function(rank, *args)


def on_ranks(world_size: int = 0) -> Callable:
    """Decorate a test so that its body runs on so many ranks over gloo, in a new folder.

    Without a number, the test's argument `world_size` says how many.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def start(**arguments: Any) -> None:
            body = (test.__module__, test.__name__, arguments)
            run_on_ranks(world_size or arguments["world_size"], _run_body, scratch_folder(), *body)

        _, *others = signature(test).parameters.values()  # pytest gives all of them but `rank`
        start.__signature__ = Signature(others)  # type: ignore[attr-defined]
        start.body = test  # type: ignore[attr-defined]
        return start

    return decorate


def _run_body(rank: int, folder: Path, module: str, test: str, arguments: dict[str, Any]) -> None:
    os.chdir(folder)
    dist.init_process_group("gloo")
    getattr(import_module(module), test).body(rank, **arguments)


def gather_from_ranks(value: Any) -> list:
    """Return the values of all ranks; every rank must call this."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
