"""What each way to share a step costs: threads, and the reducers of stage 03."""

from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shm  # noqa: F401 (its backend)
from plots import BLUE, GRAY, Figure, ratio_bars
from step import build, ddp, make_step, start
from timing import SAME, Effort, Results, chapter, compare

RANKS = 2
by_hand: Any = chapter("02", "from_scratch")
ring_all_reduce = chapter("03", "ring").ring_all_reduce
REDUCERS = chapter("03", "reducers").REDUCERS
convert = chapter("05", "sync_batchnorm").convert_sync_batchnorm


def on_ranks(function: Callable, effort: Effort) -> Results:
    first, *_ = start(RANKS, function, effort, device=effort.device)
    return {"provenance": {"world_size": RANKS, "threads_a_rank": 1}, **first}


def build_alone(name: str) -> tuple[nn.Module, Tensor]:
    """A model and a whole batch for it."""
    torch.manual_seed(0)
    if name == "small operations":  # 500 of them, on a few numbers each
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(500))), torch.randn(8, 8)
    if name == "big operations":
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.randn(512, 1024)
    return build(name, 120)


def time_halves(models: dict[str, int], rounds: int) -> Results:
    """The forward of two halves: one after the other, in two threads, in two processes."""
    found, rank, devices = {}, dist.get_rank(), [torch.device("cpu")] * 2
    for name, steps in models.items():
        model, x = build_alone(name)
        parts = by_hand.scatter(devices, x)
        variants: dict[str, Callable] = {
            "in turn": lambda model=model, parts=parts: [model(*args) for args, _ in parts],
            "two threads": partial(by_hand.apply, [model, model], parts, devices),
            "two processes": partial(model, *parts[rank][0]),
        }
        if rank == 1:  # it waits, unless both processes work
            variants |= dict.fromkeys(("in turn", "two threads"), lambda: None)
        found[name] = {"batch": len(x), "forward": compare(variants, rounds, steps)["variants"]}
    return found


def measure_threads(effort: Effort) -> Results:
    """On the CPU: the interpreter lock costs what a model's Python code holds it for."""
    steps = {"net": 5, "small operations": 5, "big operations": 2}  # per round
    rounds = min(20, effort.rounds)
    first, _ = start(RANKS, time_halves, {"net": 5} if effort.quick else steps, rounds)
    return {"provenance": {"rounds": rounds}, "models": first}


COMPUTE = "compute only"
DDP: dict[str, Callable] = {"DDP": ddp, "DDP, static graph": partial(ddp, static_graph=True)}
DDP["DDP, gradients as views"] = partial(ddp, gradient_as_bucket_view=True)
SYNCED = "DDP, SyncBN"
MODELS = {"net": (31, 15), "net-bn": (25, 5), "mlp": (25, 4), "resnet18": (15, 1)}  # rounds, steps
SIZES = [2**power for power in range(16, 27)]  # bytes, 64 KiB to 64 MiB


def time_reducers(name: str, effort: Effort, over_shm: bool) -> Results:
    """A step with each reducer and with DDP, or with DDP over shm; and without averaging."""
    (model, batch), (rounds, steps) = build(name), MODELS[name]
    variants = {COMPUTE: make_step(model, batch)}
    for reducer, make in {} if over_shm else REDUCERS.items():
        if not (batch.is_cuda and reducer == "shared-memory"):
            variants[reducer] = make_step(model, batch, reducer=make)
    wraps: dict[str, Callable] = {"DDP": ddp} if over_shm else dict(DDP)
    if name in ("net-bn", "resnet18"):
        wraps[SYNCED] = lambda model: ddp(convert(model))
    for how, wrap in wraps.items():
        variants[how + ", over shm" * over_shm] = make_step(model, batch, wrap)
    parameters = sum(p.numel() for p in model.parameters())
    found = compare(variants, min(rounds, effort.rounds), 1 if effort.quick else steps)
    return {"parameters": parameters, "local_batch": len(batch), **found}


def time_ring(size: int, effort: Effort) -> Results:
    """Bus bandwidth: the bytes that a rank must send, 2 (n - 1) / n of the tensor, by the time."""
    tensor, steps = torch.zeros(size // 4), 1 if effort.quick else max(1, 2**23 // size)
    both = {"gloo": partial(dist.all_reduce, tensor), "ring": partial(ring_all_reduce, tensor)}
    found = compare(both, min(25, effort.rounds), steps)["variants"]
    sent, ratio = 2 * (RANKS - 1) / RANKS * size, round(1 / found["ring"]["ratio"], 4)
    rates = {f"{n}_bytes_per_second": round(sent / found[n]["step_ms"] * 1000) for n in both}
    return {"bytes": size, **rates, "ring_to_gloo": ratio}


def reducers(effort: Effort, over_shm: bool = False) -> Results:
    names, sizes = (["net"], SIZES[:3]) if effort.quick else (list(MODELS), SIZES)
    models = {name: time_reducers(name, effort, over_shm) for name in names}
    return {"models": models, "ring": [] if over_shm else [time_ring(s, effort) for s in sizes]}


def measure_reducers(effort: Effort) -> Results:
    """Over gloo or nccl, and on a CPU over shm, each beside computing alone in the same rounds."""
    found = on_ranks(reducers, effort)
    if effort.device == "cpu":
        over_shm, *_ = start(RANKS, reducers, effort, True, backend="shm")
        for name, model in over_shm["models"].items():
            rows = {how: row for how, row in model["variants"].items() if "shm" in how}
            found["models"][name]["variants"] |= rows
    return found


def draw_reducers(results: Results) -> Figure:
    figure, axes = plt.subplots(3, 2, figsize=(11, 12), layout="constrained")
    axes.flat[-2].remove()
    for axis, (name, found) in zip(axes.flat, results["models"].items(), strict=False):
        rows = {v: row for v, row in found["variants"].items() if v not in (COMPUTE, SAME)}
        ratio_bars(axis, rows, [(BLUE if v in REDUCERS or "shm" in v else GRAY, "") for v in rows])
        axis.set(title=f"{name}, {found['parameters']:,} parameters")
        axis.set(xlabel="time of a step / time of computing only")
    axis, sizes = axes.flat[-1], [row["bytes"] / 2**20 for row in results["ring"]]
    for by, label, look, color in ("gloo", "gloo's own", "s-", GRAY), ("ring", "ours", "o-", BLUE):
        rates = [row[f"{by}_bytes_per_second"] / 1e9 for row in results["ring"]]
        axis.plot(sizes, rates, look, color=color, label=label)
    axis.set(title="All-reduce alone", xlabel="size of the tensor, MiB", xscale="log")
    axis.set(ylabel="bus bandwidth, GB/s", ylim=(0, None))
    axis.legend()
    figure.suptitle(
        f"{RANKS} ranks, one thread each, {results['provenance']['hardware']}. "
        "Blue: by hand; gray: torch's; black lines: 95 % intervals"
    )
    return figure
