"""How long is a step with each reducer of stage 03, and with DDP? Over gloo and over shm."""

from collections.abc import Callable
from functools import partial
from inspect import signature

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure.sections import section
from benchmarks.measure.timing import AA, Effort, VariantSteps, interleave_steps, summarize
from benchmarks.measure.training_step import (
    build,
    ddp_without_buffers,
    step_on_copy,
    with_sync_batchnorm,
)
from benchmarks.result_files import Results
from local_ranks.ranks import run_ranks
from reducers import REDUCERS, Flat
from shared import fill_missing_gradients
from shm.cores import pin

RANKS = 2

ROUNDS_AND_STEPS = {"net": (31, 15), "net-bn": (25, 5), "mlp": (25, 4), "resnet18": (15, 1)}
WITH_BATCHNORM = ("net-bn", "resnet18")
WRAPS: dict[str, Callable] = {
    "DDP": ddp_without_buffers,
    "DDP, static graph": partial(ddp_without_buffers, static_graph=True),
    "DDP, gradients as views": partial(ddp_without_buffers, gradient_as_bucket_view=True),
    "DDP, batched copies": partial(ddp_without_buffers, batched_grad_copy=True),
}
SKIPPED = {}  # by variant: why this torch cannot run it
if "batched_grad_copy" not in signature(DistributedDataParallel).parameters:
    SKIPPED["DDP, batched copies"] = f"new in torch 2.14, and this is {torch.__version__}"


class FlatAndFlags(Flat):
    """Flat, which first asks in a message of its own which gradients there are."""

    def finish(self) -> None:
        fill_missing_gradients(self.parameters)
        super().finish()


def ddp_with_sync_batchnorm(model: nn.Module) -> nn.Module:
    return ddp_without_buffers(with_sync_batchnorm(model))


def time_over_gloo(rank: int, name: str, effort: Effort) -> Results:
    """Time a step with each reducer and with DDP, beside one without averaging."""
    model, batch = build(name)
    variants = {"compute only": step_on_copy(model, batch)}
    for reducer_name, reducer in {**REDUCERS, "flat, one tiny message more": FlatAndFlags}.items():
        variants[reducer_name] = step_on_copy(model, batch, reducer=reducer)
    for wrap_name in (each for each in WRAPS if each not in SKIPPED):
        variants[wrap_name] = step_on_copy(model, batch, WRAPS[wrap_name])
    if name in WITH_BATCHNORM:
        variants["DDP, SyncBN"] = step_on_copy(model, batch, ddp_with_sync_batchnorm)
    return {"local_batch": len(batch), **time_rounds(name, variants, effort)}


def time_over_shm(rank: int, name: str, effort: Effort) -> Results:
    """Time a step with DDP alone, beside one without averaging."""
    pin(rank, RANKS)  # as `-m shm` does
    model, batch = build(name)
    variants = {"compute only": step_on_copy(model, batch)}
    for wrap_name in ("DDP", "DDP, gradients as views"):
        variants[f"{wrap_name}, over shm"] = step_on_copy(model, batch, WRAPS[wrap_name])
    if name in WITH_BATCHNORM:
        variants["DDP, SyncBN, over shm"] = step_on_copy(model, batch, ddp_with_sync_batchnorm)
    return time_rounds(name, variants, effort)


def time_one_rank(rank: int, name: str, effort: Effort) -> Results:
    """Time SyncBatchNorm on one rank, where its layers compute and wait for nobody."""
    model, batch = build(name)
    variants = {"compute only": step_on_copy(model, batch)}
    variants["SyncBN, one rank"] = step_on_copy(model, batch, with_sync_batchnorm)
    return time_rounds(name, variants, effort)


def time_rounds(name: str, variants: VariantSteps, effort: Effort) -> Results:
    rounds, steps = ROUNDS_AND_STEPS[name]
    rounds, steps = min(rounds, effort.rounds), 1 if effort.quick else steps
    rows = summarize(interleave_steps(variants, rounds, steps))
    return {"rounds": rounds, "steps_a_round": steps, "variants": rows}


@section("reducers")
def measure_reducers(effort: Effort) -> Results:
    """Time a step over gloo and over shm, each beside computing alone in the same rounds."""
    models = dict[str, Results]()
    for name in ["net"] if effort.quick else ROUNDS_AND_STEPS:
        models[name], _ = run_ranks(RANKS, time_over_gloo, name, effort)
        others = run_ranks(RANKS, time_over_shm, name, effort, backend="shm")[:1]
        if name in WITH_BATCHNORM:
            others += run_ranks(1, time_one_rank, name, effort, backend="shm")
        rows = models[name]["variants"]
        for other in others:  # "compute only" stays as timed over gloo
            rows |= {each: row for each, row in other["variants"].items() if each not in rows}
        rows[AA] = rows.pop(AA)  # the last row
    return {"ranks": RANKS, "skipped": SKIPPED, "models": models}
