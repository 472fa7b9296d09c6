"""What each way to share a step costs: threads, and the reducers of stage 03."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shm  # noqa: F401 (its backend)
from ranks import start
from step import build, ddp, make_step
from timing import Effort, Results, chapter, compare

RANKS = 2
by_hand: Any = chapter("02", "from_scratch")
REDUCERS = chapter("03", "reducers/reducers").REDUCERS
convert = chapter("05", "sync_batchnorm").convert_sync_batchnorm

STEPS_OF_THREADS = {"net": 5, "small operations": 5, "big operations": 2}  # in each round
ROUNDS_AND_STEPS = {"net": (31, 15), "net-bn": (25, 5), "mlp": (25, 4), "resnet18": (15, 1)}
WRAPS: dict[str, Callable] = {
    "DDP": ddp,
    "DDP, static graph": partial(ddp, static_graph=True),
    "DDP, gradients as views": partial(ddp, gradient_as_bucket_view=True),
}


def build_whole(name: str) -> tuple[nn.Module, Tensor]:
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
        model, batch = build_whole(name)
        halves = by_hand.scatter(devices, batch)
        variants: dict[str, Callable] = {
            "in turn": lambda model=model, halves=halves: [model(*args) for args, _ in halves],
            "two threads": partial(by_hand.apply, [model, model], halves, devices),
            "two processes": partial(model, *halves[rank][0]),
        }
        if rank == 1:  # it waits, unless both processes work
            variants |= dict.fromkeys(("in turn", "two threads"), lambda: None)
        rows = compare(variants, rounds, steps)["variants"]
        models[name] = {"batch": len(batch), "forward": rows}
    return models


def measure_threads(effort: Effort) -> Results:
    """On the CPU: the interpreter lock costs what a model's Python code holds it for."""
    rounds, steps_of = min(20, effort.rounds), {"net": 5} if effort.quick else STEPS_OF_THREADS
    first, _ = start(RANKS, time_halves, steps_of, rounds)
    return {"provenance": {"rounds": rounds}, "models": first}


def ddp_with_sync_batchnorm(model: nn.Module) -> nn.Module:
    return ddp(convert(model))


def time_reducers(name: str, effort: Effort, over_shm: bool) -> Results:
    """A step with each reducer and with DDP, or with DDP over shm; and without averaging."""
    model, batch = build(name)
    variants = {"compute only": make_step(model, batch)}
    wraps = {"DDP": WRAPS["DDP"]} if over_shm else dict(WRAPS)
    if not over_shm:
        for reducer, make in REDUCERS.items():
            variants[reducer] = make_step(model, batch, reducer=make)
    if name in ("net-bn", "resnet18"):
        wraps["DDP, SyncBN"] = ddp_with_sync_batchnorm
    for wrap_name, wrap in wraps.items():
        variants[wrap_name + ", over shm" * over_shm] = make_step(model, batch, wrap)
    rounds, steps = ROUNDS_AND_STEPS[name]
    times = compare(variants, min(rounds, effort.rounds), 1 if effort.quick else steps)
    return {"local_batch": len(batch), **times}


def time_models(names: list[str], effort: Effort, over_shm: bool) -> Results:
    return {name: time_reducers(name, effort, over_shm) for name in names}


def measure_reducers(effort: Effort) -> Results:
    """Over gloo, and over shm, each beside computing alone in the same rounds."""
    names = ["net"] if effort.quick else list(ROUNDS_AND_STEPS)
    models, *_ = start(RANKS, time_models, names, effort, False)
    over_shm, *_ = start(RANKS, time_models, names, effort, True, backend="shm")
    for name, model in over_shm.items():
        rows = {how: row for how, row in model["variants"].items() if "shm" in how}
        models[name]["variants"] |= rows
    return {"provenance": {"world_size": RANKS, "threads_a_rank": 1}, "models": models}
