"""What does each level hold, send and take? By hand and with PyTorch's classes, side by side.

    python beyond/shard/measure_levels.py

It writes benchmarks/results/shard.json. Do not use the machine for anything else meanwhile.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.measure.timing import interleave_steps, summarize
from benchmarks.result_files import RESULTS, provenance, save
from common.chapters import load_chapter
from common.options import Parser, UsageError, exit_on, int_at_least
from common.ranks import run_ranks
from language import BYTES, LENGTH, Transformer
from levels import LEVELS, Training, by_hand, by_library
from traffic import received_bytes

Ledger = load_chapter("01", "peak").Ledger
size = load_chapter("02", "memory").size
KINDS = ("parameters", "gradients", "optimizer state")
VARIANTS: dict[str, tuple[Callable[..., Training], str]] = {
    "DDP": (by_hand, "none"),
    "ZeRO-1 by hand": (by_hand, "optimizer"),
    "ZeRO-2 by hand": (by_hand, "gradients"),
    "FSDP by hand": (by_hand, "parameters"),
    "ZeroRedundancyOptimizer": (by_library, "optimizer"),
    "fully_shard, not after forward": (by_library, "gradients"),
    "fully_shard": (by_library, "parameters"),
}
WIDTH, LAYERS = 256, 8  # of the transformer
BATCH = 2  # samples of each rank
STEPS = 2  # before anything is counted, and counted


def formula(level: str, world_size: int) -> dict[str, float]:
    """What the ZeRO paper's Figure 1 says that a rank holds, in multiples of the parameters' bytes.

    Adam's state is two numbers for each parameter, here in the same format.
    """
    divided = LEVELS.index(level)  # none, optimizer, gradients, parameters
    parameters, gradients, state = (1 / world_size if divided >= n else 1.0 for n in (3, 2, 1))
    return dict(zip(KINDS, (parameters, gradients, 2 * state), strict=True))


def own_part(tensor: Any) -> Tensor:
    """What this rank holds of a tensor: of PyTorch's DTensor, its local one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held_by_kind(training: Training) -> dict[str, int]:
    """Bytes of what this rank keeps between two steps, before zero_grad."""
    optimizer: Any = training.optimizer
    gradients: list = [p.grad for p in training.model.parameters()]
    gradients += [bucket.shard for bucket in getattr(optimizer, "buckets", [])]  # ZeRO-2's
    inner = getattr(optimizer, "inner", getattr(optimizer, "optim", optimizer))  # what it wraps
    states = [value for state in inner.state.values() for value in state.values()]
    held = {}
    for kind, values in zip(KINDS, (training.model.parameters(), gradients, states), strict=True):
        held[kind] = size(own_part(value) for value in values if isinstance(value, Tensor))
    return held


def training_step(training: Training, length: int = LENGTH) -> None:
    """One step on random tokens: what they are makes no difference here."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(BYTES, (BATCH, length))
    training.optimizer.zero_grad()
    logits = training.model(tokens).flatten(0, 1)
    F.cross_entropy(logits, tokens.roll(-1, dims=1).flatten()).backward()
    training.finish()
    training.optimizer.step()


def build(width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(width, layers)


def count_held(
    make_training: Callable[..., Training], level: str, build_model: Callable = build
) -> dict[str, int]:
    """Bytes by kind after some steps, and all that is alive, by the ledger of stage 01.

    What is alive and of no kind is held in secret: a copy that should not be there. It is not
    comparable for fully_shard, which empties storages that the ledger still counts.
    """
    ledger = Ledger("cpu", counted="cpu")
    with ledger:
        training = make_training(level, build_model(), AdamW, lr=1e-3)
        for _ in range(STEPS):
            training_step(training)
        dist.barrier()
        held, end = held_by_kind(training), time.monotonic() + 5
        while ledger.bytes > sum(held.values()) and time.monotonic() < end:
            time.sleep(0.01)  # a thread of gloo lets the last message go a moment later
    return {**held, "alive": ledger.bytes}


def count_sent(
    make_training: Callable[..., Training], level: str, build_model: Callable = build
) -> float:
    """Bytes that each rank sends in a step, in multiples of the parameters' bytes."""
    model = build_model()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    training = make_training(level, model, AdamW, lr=1e-3)
    for _ in range(STEPS):
        training_step(training, length=8)  # more tokens would send no more
    dist.barrier()  # what was sent before has arrived
    before = received_bytes()
    dist.barrier()  # no rank sends before all have counted
    for _ in range(STEPS):
        training_step(training, length=8)
    total = torch.tensor(float(received_bytes() - before))
    dist.all_reduce(total)  # of all ranks, which received what all have sent
    return total.item() / STEPS / dist.get_world_size() / parameters


def measure(rank: int, rounds: int) -> dict[str, Any]:
    """What one rank finds; every rank must call it."""
    held = {
        name: count_held(make_training, level) for name, (make_training, level) in VARIANTS.items()
    }
    sent = {
        name: count_sent(make_training, level) for name, (make_training, level) in VARIANTS.items()
    }
    steps = {}
    for name, (make_training, level) in VARIANTS.items():
        steps[name] = partial(training_step, make_training(level, build(), AdamW, lr=1e-3))
    times = summarize(interleave_steps(steps, rounds))
    return {"held_bytes": held, "sent_multiples": sent, "variants": times}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--rounds", default=41, type=int_at_least(1), help="each variant once in each of them"
    )
    args = parser.parse_args()
    world_size = 2
    origin = provenance(
        command="python beyond/shard/measure_levels.py", world_size=world_size, threads_a_rank=1
    )
    measured = run_ranks(world_size, measure, args.rounds)[0]
    parameters = sum(parameter.nbytes for parameter in build().parameters())
    model = f"a transformer of {parameters // 4:,} parameters"
    settings = {
        "model": model,
        "parameter_bytes": parameters,
        "rounds": args.rounds,
        "local_batch": BATCH,
    }
    save(RESULTS / "shard.json", {"provenance": origin, **settings, **measured})


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
