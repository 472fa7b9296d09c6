"""A step with each reducer of stage 03, and with DDP: over gloo, and over shared memory."""

from collections.abc import Callable
from functools import partial

from torch import nn

import shm  # noqa: F401 (its backend)
from ranks import run_ranks
from timing import Effort, Results, compare, load_chapter
from training_step import build, ddp_without_buffers, make_step

RANKS = 2
REDUCERS = load_chapter("03", "reducers/reducers").REDUCERS
convert = load_chapter("05", "sync_batchnorm").convert_sync_batchnorm

ROUNDS_AND_STEPS = {"net": (31, 15), "net-bn": (25, 5), "mlp": (25, 4), "resnet18": (15, 1)}
WRAPS: dict[str, Callable] = {
    "DDP": ddp_without_buffers,
    "DDP, static graph": partial(ddp_without_buffers, static_graph=True),
    "DDP, gradients as views": partial(ddp_without_buffers, gradient_as_bucket_view=True),
}


def ddp_with_sync_batchnorm(model: nn.Module) -> nn.Module:
    return ddp_without_buffers(convert(model))


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
    models, *_ = run_ranks(RANKS, time_models, names, effort, False)
    over_shm, *_ = run_ranks(RANKS, time_models, names, effort, True, backend="shm")
    for model_name, model in over_shm.items():
        rows = {name: row for name, row in model["variants"].items() if "shm" in name}
        models[model_name]["variants"] |= rows
    return {"provenance": {"world_size": RANKS, "threads_a_rank": 1}, "models": models}
