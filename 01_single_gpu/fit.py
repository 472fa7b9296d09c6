"""Does one GPU hold it? The bytes of a training step, the largest batch, and what to do.

    python 01_single_gpu/fit.py --model resnet50 --image-size 224 --memory-limit 8GiB

Steps are rehearsed without memory (peak.py), so no GPU is needed. Without --memory-limit, the limit
is what this machine's GPU has. Everything is in fp32. Leave some hundred MiB for what a rehearsal
does not count: the CUDA context, workspaces of cuDNN and cuBLAS.
"""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import suppress
from textwrap import fill

import torch
from tabulate import tabulate

from common.bar import progress_bar
from common.options import MODELS, Parser, UsageError, exit_on, int_at_least
from peak import KINDS, MIB, OPTIMIZERS, Plan, parts_of, peaks, rehearsed_peak

GPUS, MOST = (1, 2, 4, 8), 2**16  # numbers of GPUs; the largest batch that is tried
ALONE = """Plain data parallelism cannot help: each GPU holds all parameters, gradients, optimizer
state, and the activations of a sample."""
RECOMPUTE = """Sharding on 8 GPUs is not enough, either. If the activations are too large, recompute
them: torch.utils.checkpoint."""
SHARDINGS = {  # what each divides among GPUs: Rajbhandari et al., ZeRO, arXiv 1910.02054, Figure 1
    "ZeRO-1": ("optimizer state",),
    "ZeRO-2": ("optimizer state", "gradients"),
    "FSDP": ("optimizer state", "gradients", "parameters"),
}
StepFits = Callable[[int, int, int], bool]  # of micro-batch, number of micro-batches, more bytes
Needs = dict[tuple[int, str], int]  # bytes of each GPU, by number of GPUs and sharding


def parse_size(text: str) -> int:
    """Return the bytes that a text like 8GiB names."""
    match = re.fullmatch(r"(\d+\.?\d*) ?(MiB|GiB)", text)
    size = float(match[1]) * (MIB if match[2] == "MiB" else 1024 * MIB) if match else 0
    if not 0 < size < 2**50:  # far more, and torch could not count a step that just fits
        why = f"got {text!r}, expected a size above 0 and below {2**20}GiB"
        raise ArgumentTypeError(f"{why}, like 512MiB or 8GiB")
    return int(size)


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    # Together, these limits keep the bytes of a step within the 63 bits that torch counts in.
    size, count = int_at_least(1, below=2**13), int_at_least(1, below=2**20)
    add = parser.add_argument
    add("--model", default="net", choices=MODELS, help="network to train")
    add("--image-size", default=28, type=size, metavar="N", help="pixels per side")
    add("--channels", default=3, type=size, metavar="N", help="channels of an image")
    add("--classes", default=10, type=count, metavar="N", help="outputs of the network")
    add("--optimizer", default="momentum", choices=tuple(OPTIMIZERS), help="sgd has no momentum")
    add("--batch-size", default=120, type=count, metavar="N", help="global batch, in samples")
    add("--memory-limit", type=parse_size, metavar="SIZE", help="like 8GiB; else what this GPU has")
    return parser.parse_args()


def largest(batch_fits: Callable[[int], bool], least: int) -> int:
    """Find the largest batch that fits, by doubling and bisection; 0 if not even the least does."""
    if not batch_fits(least):
        return 0
    low, high = least, 2 * least
    while high <= MOST and batch_fits(high):
        low, high = high, 2 * high
    while low < MOST and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if batch_fits(middle) else (low, middle)
    return low


def least_batch(plan: Plan) -> int:
    """Return 1, or 2 where BatchNorm refuses a single value for each channel."""
    try:
        rehearsed_peak(plan, 1)
        return 1
    except ValueError:
        return 2


def micro_batches_by_gpus(
    batch: int, least: int, step_fits: StepFits, gradients: int
) -> dict[int, int]:
    """Micro-batches that each local batch needs; 0: none helps. 3 hold as much as 2."""
    micro_batches = {}
    for gpus in (n for n in GPUS if batch % n == 0 and batch // n >= least):
        local, buckets = batch // gpus, gradients if gpus > 1 else 0  # DDP's are one more copy
        numbers = (k for k in range(1, local // least + 1) if local % k == 0)
        fitting = (k for k in numbers if step_fits(local // k, min(k, 2), buckets))
        micro_batches[gpus] = next(fitting, 0)
    return micro_batches


def bytes_if_sharded(plan: Plan, batch: int, sharding: str, gpus: int) -> int:
    """Bytes that each of so many GPUs needs for a batch of its own.

    It leaves out what FSDP has whole while a layer computes, and ZeRO-2's buckets in backward.
    """
    parts, peak = parts_of(plan), peaks(plan, batch)
    held = sum(parts[kind] for kind in KINDS)
    divided = sum(parts[kind] for kind in SHARDINGS[sharding])
    step = held + (peak["optimizer"] - held) // gpus  # each GPU updates only its part
    return max(peak["forward"], peak["backward"], step) - divided + divided // gpus


def sharding_needs(plan: Plan, batch: int) -> Needs:
    return {
        (gpus, sharding): bytes_if_sharded(plan, batch, sharding, gpus)
        for gpus in GPUS[1:]
        for sharding in SHARDINGS
    }


def print_needs(needs: Needs, batch: int) -> None:
    rows = [
        (gpus, *(f"{needs[gpus, sharding] / MIB:,.2f}" for sharding in SHARDINGS))
        for gpus in GPUS[1:]
    ]
    print(f"\nsharded, each GPU needs for a batch of {batch}, in MiB:\n")
    print(tabulate(rows, ("GPUs", *SHARDINGS), disable_numparse=True, colalign=["right"] * 4))


def advise_sharding(needs: Needs, batch: int, limit: int) -> str:
    # ZeRO-2 holds less than ZeRO-1 and sends less; FSDP sends more.
    enough = [key for key, size in needs.items() if size <= limit and key[1] != "ZeRO-1"]
    if not enough:
        return RECOMPUTE
    gpus, sharding = enough[0]
    besides = ", and room for its largest layer" if sharding == "FSDP" else ""
    size = f"{needs[gpus, sharding] / MIB:,.0f} MiB"
    return (
        f"With {sharding} on {gpus} GPUs it needs {size} on each for a batch of {batch}{besides}."
    )


def advise(batch: int, most: int, micro_batches: dict[int, int]) -> str:
    if batch <= most:
        return f"one GPU holds a batch of {batch}."
    ways = []
    if k := micro_batches.get(1):
        ways.append(f"accumulate {k} micro-batches of {batch // k} on one GPU")
    if enough := [gpus for gpus, k in micro_batches.items() if gpus > 1 and k == 1]:
        ways.append(f"go data-parallel on {enough[0]} GPUs, with {batch // enough[0]} on each")
    ways = ways or ["take a batch with more divisors, or DDP with gradient_as_bucket_view=True"]
    return f"one GPU does not hold a batch of {batch} at once: {', or '.join(ways)}."


def report(args: Namespace, plan: Plan, limit: int) -> None:
    def step_fits(micro_batch: int, number: int, besides: int) -> bool:
        return rehearsed_peak(plan, micro_batch, number)[0] + besides <= limit

    least, batch, image = least_batch(plan), args.batch_size, args.image_size
    if batch < least:
        raise UsageError("BatchNorm needs more than one value for each channel: try --batch-size 2")
    with progress_bar(f"rehearsing a batch of {batch}"):
        parts, (peak, moment) = parts_of(plan), rehearsed_peak(plan, batch)
    parts[f"peak with a batch of {batch}, in {moment}"] = peak
    print(f"{args.model} with {args.optimizer}, images of {args.channels} × {image} × {image}\n")
    table = [(name, f"{size / MIB:,.2f}") for name, size in parts.items()]
    print(tabulate(table, ("", "MiB"), disable_numparse=True, colalign=("left", "right")))
    with progress_bar("rehearsing other batches"):
        most = largest(lambda samples: step_fits(samples, 1, 0), least)
        micro_batches = {}
        if 0 < most < batch:
            micro_batches = micro_batches_by_gpus(batch, least, step_fits, parts["gradients"])
        needs = {} if most else sharding_needs(plan, least)
    print(f"\nlargest batch at once: {most}{' or more' if most >= MOST else ''}")
    if ways := [(n, batch // n, k, batch // n // k) for n, k in micro_batches.items() if k]:
        print(f"\nways to cut a global batch of {batch}:\n")
        print(tabulate(ways, ("GPUs", "local batch", "accumulate", "micro-batch")))
    advice = advise(batch, most, micro_batches)
    if not most:
        print_needs(needs, least)
        advice = f"not even a batch of {least} fits. {ALONE} {advise_sharding(needs, least, limit)}"
    print("\n" + fill(f"Advice: {advice}", 90))


def main() -> None:
    args = parse_args()
    limit = args.memory_limit
    if limit is None:
        if not torch.cuda.is_available():
            raise UsageError("there is no GPU whose memory is the limit: try --memory-limit 8GiB")
        _, limit = torch.cuda.mem_get_info()  # free, total
    plan = Plan(args.model, args.image_size, args.optimizer, "cuda", args.channels, args.classes)
    report(args, plan, limit)


if __name__ == "__main__":
    with exit_on(UsageError), suppress(BrokenPipeError):  # a pipe into `head` ends early
        main()
