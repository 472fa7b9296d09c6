"""A step with each reducer of stage 03, and with DDP: over gloo, and over shared memory."""

from collections.abc import Callable
from functools import partial

from ranks import run_ranks
from torch import nn

import shm  # noqa: F401 (its backend)
from timing import Effort, Results, interleave, load_chapter, summarize
from training_step import build, ddp_without_buffers, train_copy, with_sync_batchnorm

RANKS = 2
REDUCERS = load_chapter("03", "reducers/reducers").REDUCERS

ROUNDS_AND_STEPS = {"net": (31, 15), "net-bn": (25, 5), "mlp": (25, 4), "resnet18": (15, 1)}
WITH_BATCHNORM = ("net-bn", "resnet18")
WRAPS: dict[str, Callable] = {
    "DDP": ddp_without_buffers,
    "DDP, static graph": partial(ddp_without_buffers, static_graph=True),
    "DDP, gradients as views": partial(ddp_without_buffers, gradient_as_bucket_view=True),
}


def ddp_with_sync_batchnorm(model: nn.Module) -> nn.Module:
    return ddp_without_buffers(with_sync_batchnorm(model))


def time_model(name: str, effort: Effort, over_shm: bool) -> Results:
    """A step with each reducer and with DDP, or with DDP over shm; and without averaging."""
    model, batch = build(name)
    variants = {"compute only": train_copy(model, batch)}
    sync_batchnorm = {"DDP, SyncBN": ddp_with_sync_batchnorm} if name in WITH_BATCHNORM else {}
    if over_shm:
        for wrap_name, wrap in {"DDP": ddp_without_buffers, **sync_batchnorm}.items():
            variants[f"{wrap_name}, over shm"] = train_copy(model, batch, wrap)
    else:
        for reducer_name, reducer in REDUCERS.items():
            variants[reducer_name] = train_copy(model, batch, reducer=reducer)
        for wrap_name, wrap in {**WRAPS, **sync_batchnorm}.items():
            variants[wrap_name] = train_copy(model, batch, wrap)
    rounds, steps = ROUNDS_AND_STEPS[name]
    rounds, steps = min(rounds, effort.rounds), 1 if effort.quick else steps
    rows = summarize(interleave(variants, rounds, steps))
    about = {"local_batch": len(batch), "rounds": rounds, "steps_a_round": steps}
    return {**about, "variants": rows}


def measure_reducers(effort: Effort) -> Results:
    """Over gloo, and over shm, each beside computing alone in the same rounds."""
    models = dict[str, Results]()
    for name in ["net"] if effort.quick else ROUNDS_AND_STEPS:
        models[name], _ = run_ranks(RANKS, time_model, name, effort, False)
        over_shm, _ = run_ranks(RANKS, time_model, name, effort, True, backend="shm")
        rows = over_shm["variants"].items()
        models[name]["variants"] |= {variant: row for variant, row in rows if "shm" in variant}
    return {"ranks": RANKS, "models": models}
