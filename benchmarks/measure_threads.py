"""The forward of two halves of a batch: in turn, in two threads, and in two processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from timing import Effort, Results, interleave, load_chapter, summarize
from training_step import build

RANKS = 2
STEPS_OF_MODEL = {"net": 5, "small operations": 5, "big operations": 2}  # in each round
by_hand: Any = load_chapter("02", "from_scratch")


def model_and_whole_batch(name: str) -> tuple[nn.Module, Tensor]:
    """A model and a whole batch for it."""
    torch.manual_seed(0)
    if name == "small operations":  # 500 of them, on a few numbers each
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(500))), torch.randn(8, 8)
    if name == "big operations":
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.randn(512, 1024)
    return build(name, 120)


def time_halves(steps_of: dict[str, int], rounds: int) -> Results:
    """The forward of two halves: one after the other, in two threads, in two processes."""
    models, rank, devices = {}, dist.get_rank(), [torch.device("cpu")] * 2
    for name, steps in steps_of.items():
        model, batch = model_and_whole_batch(name)
        halves = by_hand.scatter(devices, batch)
        variants: dict[str, Callable] = {
            "in turn": lambda model=model, halves=halves: [model(*args) for args, _ in halves],
            "two threads": partial(by_hand.apply, [model, model], halves, devices),
            "two processes": partial(model, *halves[rank][0]),
        }
        if rank == 1:  # it waits, unless both processes work
            variants |= dict.fromkeys(("in turn", "two threads"), lambda: None)
        rows = summarize(interleave(variants, rounds, steps))
        models[name] = {"batch": len(batch), "forward": rows}
    return models


def measure_threads(effort: Effort) -> Results:
    """On the CPU: the interpreter lock costs what a model's Python code holds it for."""
    rounds, steps_of = min(20, effort.rounds), {"net": 5} if effort.quick else STEPS_OF_MODEL
    first, _ = run_ranks(RANKS, time_halves, steps_of, rounds)
    return {"rounds": rounds, "models": first}
