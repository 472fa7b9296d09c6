"""Train a stage as the tests do: in float64, on ranks of this machine, with lines left out."""

import os
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from common.options import make_parser
from local_ranks.chapters import ROOT
from local_ranks.machine import (
    SECONDS,
    scratch_folder,
    timeout_under_load,
    use_default_start_method,
)
from local_ranks.ranks import run_ranks
from local_ranks.run_files import Run
from local_ranks.stage_files import LESSON_FOLDERS, Change, fresh_module

ON_CPU = ("--device=cpu", f"--data-dir={ROOT / 'data'}")
ONE_EPOCH = ("--model=net-bn", "--epochs=1", "--batch-size=60")
FP32 = {"dtype": torch.float32}  # for a run that is not in float64


def options(*flags: str) -> Namespace:
    """The options that all stages share, as these flags set them."""
    return make_parser("", "").parse_args([*ON_CPU, *flags])


def load_stage(key: str, changes: tuple[Change, ...] = ()) -> types.ModuleType:
    """A stage's train.py as a module, with the given lines of the stage's files left out.

    With changes, the stage's other modules are imported anew: one may have imported a changed file.
    """
    if changes:
        folder = f"{LESSON_FOLDERS[key]}/"
        for name, module in [*sys.modules.items()]:
            if (getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[name]
    files = dict.fromkeys([*(file for file, *_ in changes), "train.py"])
    return [fresh_module(LESSON_FOLDERS[key] / file, changes, register=True) for file in files][-1]


def spawned_as(rank: int) -> AbstractContextManager:
    """Patch mp.spawn, so that stage 03 starts no process and this one becomes the rank."""

    def spawn(train: Callable, args: tuple, nprocs: int) -> None:
        world_size, _, *others = args
        train(rank, world_size, int(os.environ["MASTER_PORT"]), *others)

    return patch.object(torch.multiprocessing, "spawn", spawn)


def run_main(stage: types.ModuleType, rank: int, *flags: str) -> str:
    """Run the main of a stage in this process, one of its ranks; returns what it prints."""
    sys.argv = ["train.py", *flags]
    with spawned_as(rank), redirect_stdout(StringIO()) as output:
        stage.main()
    if dist.is_initialized():
        dist.destroy_process_group()
    return output.getvalue()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_rank(
    rank: int, key: str, flags: tuple, dtype: torch.dtype, changes: tuple[Change, ...]
) -> tuple[dict, str]:
    """Be one rank of `train`; return its last weights and what it prints."""
    use_default_start_method()
    stage: Any = load_stage(key, changes)
    models: list[torch.nn.Module] = []
    build = stage.build_model

    def build_and_keep(*args: Any) -> torch.nn.Module:
        models.append(build(*args))
        return models[-1]

    stage.build_model = build_and_keep
    with default_dtype(dtype):
        output = run_main(stage, rank, *flags)
    state = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}
    return state, output


def train(
    key: str,
    world_size: int,
    *flags: str,
    dtype: torch.dtype = torch.float64,
    changes: tuple[Change, ...] = (),
    folder: Path | None = None,
) -> Run:
    """Run a stage's main on that many ranks (01 and 02: always one), by default in float64."""
    folder = folder or scratch_folder()
    flags = (*ON_CPU, f"--run-dir={folder}", *flags)
    flags += (f"--world-size={world_size}",) if key == "03" else ()
    run = (train_rank, key, flags, dtype, changes)
    ranks = run_ranks(world_size, *run, backend=None, seconds=timeout_under_load(SECONDS))
    return Run(folder, [state for state, _ in ranks], ranks[0][1])


@cache
def train_once(key: str, world_size: int, *flags: str, **more: Any) -> Run:
    """Train as `train` does, but make the same run only once, for tests that only look at it."""
    return train(key, world_size, *flags, **more)
