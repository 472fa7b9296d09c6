"""Install all watchers in a process of the user's command."""

import atexit
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from prove import random_state
from prove.checks import CHECKS
from prove.rank_record import Ended, Mode, Settings, read_records
from prove.watch import (
    data,
    feeder,
    float64,
    loop_watcher,
    loss,
    model,
    operations,
    process_io,
    random_numbers,
    schedule,
)
from prove.watch.rank_run import RankRun, wrap

SEEDS_APART = 1000  # of two neighboring ranks


def seed_of(settings: Settings) -> int:
    """Choose the seed with which the script's generators begin.

    A replay takes the seed of the observed run: that of rank 0, or in a control of this rank.
    """
    if settings.seed is not None:
        return settings.seed + SEEDS_APART * int(os.environ.get("RANK", 0))
    rank = int(os.environ.get("RANK", 0)) if settings.mode == Mode.CONTROL else 0
    if settings.mode not in (Mode.OBSERVE, Mode.BARE):
        observed_records = read_records(settings.folder, Mode.OBSERVE)
        return observed_records[min(rank, len(observed_records) - 1)].seed
    return int.from_bytes(os.urandom(4), "big")


def not_compiled(model: Any = None, **_: Any) -> Any:
    """Stand in for torch.compile: return the model as it is, which may be asked for `_orig_mod`."""
    if model is None:
        return not_compiled
    if isinstance(model, torch.nn.Module):
        object.__setattr__(model, "_orig_mod", model)  # not as a module inside itself
    return model


def install() -> RankRun:
    """Put all watchers in place, once in each process of the user's, after `import torch`."""
    run = RankRun(Settings(**json.loads(os.environ["PROVE"])))
    settings = run.settings
    run.record.seed = seed_of(settings)
    random_state.seed_all(run.record.seed)
    if settings.cpu:
        from prove.watch import pretend_gpus  # imports that take a second

        pretend_gpus.install(settings.gpus)
    if settings.mode == Mode.BARE:
        process_io.watch_groups(run)
        process_io.watch_files(run)
    else:
        if settings.float64:
            float64.install()
        torch.compile = not_compiled
        for watcher in (random_numbers, feeder, model, loss, data, schedule, process_io):
            watcher.install(run)
        for check in CHECKS:
            if check.watch:
                check.watch(run)
        if settings.watches_operations:
            operations.install(run)
            loop_watcher.install(run)
        if settings.for_resume:
            from prove.resume import watch

            watch.install(run)
    atexit.register(run.write, Ended.FINISHED)

    @wrap(sys, "excepthook")
    def hook(show: Callable, kind: Any, error: BaseException, trace: Any) -> None:
        run.write_failure(error)
        show(kind, error, trace)

    return run
