"""How does a process of the user's come to watch itself? `install()` puts all watchers in place."""

import atexit
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from prove import (
    draws,
    generators,
    replay,
    watch_data,
    watch_effects,
    watch_model,
    watch_operations,
    watch_schedule,
)
from prove.rank_record import Ended, Mode, Settings, read_records
from prove.rank_run import HERE, RankRun, callers, wrap


def compute_in_float64() -> None:
    torch.set_default_dtype(torch.float64)

    @wrap(torch.Tensor, "float")
    def double(original: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caller = next(file for file, *_ in callers() if os.path.dirname(file) != HERE)
        by_torch = "/torch/amp/" in caller  # GradScaler needs what it asks for
        return original(tensor, *args, **kwargs) if by_torch else tensor.double()

    @wrap(torch.nn.Module, "to")
    def to(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
        """A model never becomes smaller: making it float64 again would lose hooks of its own."""
        kwargs = {name: widest(value) for name, value in kwargs.items()}
        return original(module, *map(widest, args), **kwargs)

    for name in ("float", "half", "bfloat16"):
        setattr(torch.nn.Module, name, torch.nn.Module.double)


def widest(value: Any) -> Any:
    is_float = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_float else value


def seed_of(settings: Settings) -> int:
    """What the script's generators begin with: anything, but in a replay what they began with in
    the observed run, of this rank or of rank 0."""
    rank = int(os.environ.get("RANK", 0)) if settings.mode == Mode.CONTROL else 0
    if settings.mode not in (Mode.OBSERVE, Mode.BARE):
        observed = read_records(settings.folder, Mode.OBSERVE)
        return observed[min(rank, len(observed) - 1)].seed
    return int.from_bytes(os.urandom(4), "big")


def install() -> RankRun:
    """Called once in each process of the user's, after `import torch`."""
    run = RankRun(Settings(**json.loads(os.environ["PROVE"])))
    settings = run.settings
    run.record.seed = seed_of(settings)
    generators.seed(run.record.seed)
    if settings.cpu:
        from prove import cpu  # it imports what takes a second

        cpu.install(settings.gpus)
    if settings.mode == Mode.BARE:
        watch_effects.watch_groups(run)
        watch_effects.watch_files(run)
    else:
        if settings.float64:
            compute_in_float64()
        torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore
        draws_of_rank = draws.install(run)
        source = replay.install(run, draws_of_rank)
        model = watch_model.install(run, draws_of_rank, source)
        watch_data.install(run, model)
        watch_schedule.install(run)
        watch_effects.install(run)
        if settings.emulate:
            watch_operations.install(draws_of_rank, model.by_hand, model.parameters_change)
    atexit.register(run.write, Ended.AT_ITS_END)

    @wrap(sys, "excepthook")
    def hook(show: Callable, kind: Any, error: BaseException, trace: Any) -> None:
        run.fail(error)
        show(kind, error, trace)

    return run
