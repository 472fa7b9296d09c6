"""What does each level of sharding hold, send and take, by hand and with PyTorch's classes?"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import levels
import text_model
from benchmarks.measure.sections import section
from benchmarks.measure.timing import Effort, interleave_steps, summarize
from benchmarks.result_files import Results
from local_ranks.ranks import run_ranks
from memory import size
from peak import Ledger
from traffic import received_bytes

VARIANTS: dict[str, tuple[Callable, str]] = {
    "DDP": (levels.by_hand, "none"),
    "ZeRO-1 by hand": (levels.by_hand, "optimizer"),
    "ZeRO-2 by hand": (levels.by_hand, "gradients"),
    "FSDP by hand": (levels.by_hand, "parameters"),
    "ZeroRedundancyOptimizer": (levels.by_library, "optimizer"),
    "fully_shard, not after forward": (levels.by_library, "gradients"),
    "fully_shard": (levels.by_library, "parameters"),
}
RANKS = 2
WIDTH, LAYERS = 256, 8  # of the transformer
BATCH = 2  # samples of each rank
STEPS = 2  # taken before anything is counted, and again while it is counted


def own_part(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor: of PyTorch's DTensor, the local one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held_by_kind(training: Any) -> dict[str, int]:
    """Count the bytes that this rank keeps between two steps, before zero_grad."""
    optimizer: Any = training.optimizer
    gradients: list = [p.grad for p in training.model.parameters()]
    gradients += [bucket.shard for bucket in getattr(optimizer, "buckets", [])]  # with ZeRO-2
    inner = getattr(optimizer, "inner", getattr(optimizer, "optim", optimizer))  # unwrapped
    states = [value for state in inner.state.values() for value in state.values()]
    held = {}
    for kind, values in zip(
        levels.KINDS, (training.model.parameters(), gradients, states), strict=True
    ):
        held[kind] = size(own_part(value) for value in values if isinstance(value, Tensor))
    return held


def take_step(training: Any, length: int = text_model.LENGTH) -> None:
    """Take one step on random tokens: what they are makes no difference here."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(text_model.BYTES, (BATCH, length))
    training.optimizer.zero_grad()
    logits = training.model(tokens).flatten(0, 1)
    F.cross_entropy(logits, tokens.roll(-1, dims=1).flatten()).backward()
    training.finish()
    training.optimizer.step()


def build(width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return text_model.Transformer(width, layers)


def count_held(
    make_training: Callable, level: str, build_model: Callable = build
) -> dict[str, int]:
    """Count bytes by kind after some steps, and all that is alive, by the ledger of stage 01.

    What is alive and of no kind is held in secret: a copy that should not be there. It is not
    comparable for fully_shard, which empties storages that the ledger still counts.
    """
    ledger = Ledger("cpu", counted="cpu")
    with ledger:
        training = make_training(level, build_model(), AdamW, lr=1e-3)
        for _ in range(STEPS):
            take_step(training)
        dist.barrier()
        held, end = held_by_kind(training), time.monotonic() + 5
        while ledger.bytes > sum(held.values()) and time.monotonic() < end:
            time.sleep(0.01)  # a thread of gloo lets the last message go a moment later
    return {**held, "alive": ledger.bytes}


def count_sent(make_training: Callable, level: str, build_model: Callable = build) -> float:
    """Count the bytes that each rank sends in a step, in multiples of the parameters' bytes."""
    model = build_model()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    training = make_training(level, model, AdamW, lr=1e-3)
    for _ in range(STEPS):
        take_step(training, length=8)  # more tokens would send no more
    dist.barrier()  # what was sent before has arrived
    before = received_bytes()
    dist.barrier()  # no rank sends before all have counted
    for _ in range(STEPS):
        take_step(training, length=8)
    total = torch.tensor(float(received_bytes() - before))
    dist.all_reduce(total)  # over all ranks: what they received is what they sent
    return total.item() / STEPS / dist.get_world_size() / parameters


def measure_one_rank(rank: int, rounds: int, build_model: Callable) -> Results:
    """Measure on one rank what each level holds, sends and takes; every rank must call it."""
    results: Results = {"held_bytes": {}, "sent_multiples": {}}
    steps = {}
    for name, (make_training, level) in VARIANTS.items():
        results["held_bytes"][name] = count_held(make_training, level, build_model)
        results["sent_multiples"][name] = count_sent(make_training, level, build_model)
    for name, (make_training, level) in VARIANTS.items():
        steps[name] = partial(take_step, make_training(level, build_model(), AdamW, lr=1e-3))
    return {**results, "variants": summarize(interleave_steps(steps, rounds))}


@section("shard")
def measure_sharding(effort: Effort) -> Results:
    rounds = min(41, effort.rounds)
    build_model = partial(build, width=32, layers=2) if effort.quick else build
    measured = run_ranks(RANKS, measure_one_rank, rounds, build_model)[0]
    parameters = sum(parameter.nbytes for parameter in build_model().parameters())
    about = {"model": f"a transformer of {parameters // 4:,} parameters", "ranks": RANKS}
    about |= {"parameter_bytes": parameters, "rounds": rounds, "local_batch": BATCH}
    return {**about, **measured}
