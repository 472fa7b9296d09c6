"""Time what SyncBatchNorm by hand costs: layer by layer, and in a training step.

    python benchmarks/sync_batchnorm.py

Two ranks, one thread each. A layer is timed alone, forward and backward, against nn.BatchNorm of
the same local batch, which sends nothing; both take turns (timing.py), and the time is that of the
slower rank. A step is one of resnet18 in DDP. What a step sends is counted: collectives and bytes.
Writes results/05_sync_batchnorm.json.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from common.options import Parser, usage_errors_exit

from timing import (
    SAME,
    add_device,
    add_effort,
    chapter,
    interleave,
    keep,
    most_rounds,
    of_the_slowest,
    provenance,
    require_device,
    summarize,
)

RANKS, BATCH, IMAGE = 2, 32, 64  # of a step: images of a rank, and their width and height
PLAIN, SYNC, SENDS = "BatchNorm", "SyncBatchNorm", "its two all-reduces alone"
LAYERS = {  # inputs of a rank (B, C, H, W)
    "net-bn, first": (60, 10, 24, 24),
    "net-bn, second": (60, 20, 8, 8),
    "resnet, first": (16, 64, 112, 112),
    "resnet18, stage 1": (16, 64, 56, 56),
    "resnet50, stage 1": (16, 256, 56, 56),
    "resnet18, last": (16, 512, 7, 7),
    "resnet50, last": (16, 2048, 7, 7),
}
FORMATS = {  # dtype of the inputs, and their layout in memory
    "fp32": (torch.float32, torch.contiguous_format),
    "fp32, channels_last": (torch.float32, torch.channels_last),
    "bf16, channels_last": (torch.bfloat16, torch.channels_last),
}

start = chapter("03", "ranks").start
convert = chapter("05", "sync_batchnorm").convert


def use_of(kind: str, shape: tuple[int, ...], how: str) -> Callable[[], None]:
    """Forward and backward of one layer, whose gradients are thrown away."""
    dtype, layout = FORMATS[how]
    rows, sums = torch.zeros(RANKS, 1 + 2 * shape[1]), torch.zeros(2, shape[1])
    layer = nn.BatchNorm2d(shape[1])
    layer = convert(layer) if kind == SYNC else layer
    x, grad = (torch.randn(shape).to(dtype).to(memory_format=layout) for _ in range(2))
    x.requires_grad_()

    def use() -> None:
        torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], grad)

    def send() -> None:
        dist.all_reduce(rows)
        dist.all_reduce(sums)

    return send if kind == SENDS else use


def step_of(kind: str, how: str) -> Callable[[], None]:
    """A training step of resnet18 in DDP; of bf16, under autocast."""
    torch.manual_seed(0)
    dtype, layout = FORMATS[how]
    model = torchvision.models.resnet18(num_classes=10).to(memory_format=layout)
    # DDP sends rank 0's statistics to all before each forward: SyncBatchNorm has made them equal.
    # Newer torch has another name for the switch, and says so; torch 2.11 has only this one.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    ddp = DistributedDataParallel(
        convert(model) if kind == SYNC else model, broadcast_buffers=False
    )
    images = torch.randn(BATCH, 3, IMAGE, IMAGE).to(memory_format=layout)
    labels = torch.arange(BATCH) % 10
    optimizer = SGD(model.parameters(), 0.01, 0.9)

    def step() -> None:
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(ddp(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def collectives(step: Callable[[], None]) -> dict[str, int]:
    """What one step asks of the process group, by name: as torch's profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return dict(Counter(event.name for event in seen.events() if event.name.startswith("c10d::")))


def compare(variants: dict[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, Any]:
    times = interleave(variants, rounds, steps, warm_up=1 if rounds == 1 else 3, meet=dist.barrier)
    return {
        "rounds": len(times[SAME]),
        "steps_a_round": steps,
        "variants": summarize(of_the_slowest(times)),
    }


def measure(most: int) -> dict[str, Any]:
    """What each rank does. most: rounds; with a single one, only of the small layers."""
    quick = most == 1
    results: dict[str, Any] = {"layers": {}, "steps": {}}
    for name, shape in LAYERS.items():
        values = torch.Size(shape).numel()
        if quick and values > 500_000:
            continue
        rounds, steps = min(21, most), 1 if quick else max(1, 5_000_000 // values)
        results["layers"][name] = {"local_batch": list(shape)}
        for how in FORMATS:
            variants = {kind: use_of(kind, shape, how) for kind in (PLAIN, SYNC, SENDS)}
            results["layers"][name][how] = compare(variants, rounds, steps)
    model = torchvision.models.resnet18(num_classes=10)
    channels = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    forward, backward = sum(RANKS * (1 + 2 * c) * 4 for c in channels), sum(8 * c for c in channels)
    results["statistics_bytes_a_step"] = {"forward": forward, "backward": backward}
    results["gradient_bytes_a_step"] = sum(4 * p.numel() for p in model.parameters())
    results["collectives_a_step"] = {}
    for kind in (PLAIN, SYNC):
        step = step_of(kind, "fp32")
        for _ in range(2):  # DDP rebuilds its buckets after the first
            step()
        results["collectives_a_step"][kind] = collectives(step)
    for how in list(FORMATS)[:1] if quick else FORMATS:
        rounds = min(21, most)
        variants = {kind: step_of(kind, how) for kind in (PLAIN, SYNC)}
        results["steps"][how] = compare(variants, rounds, 1)
    return results


def rows_of(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """For each layer and the step, in each format: ms, and the ratio to BatchNorm."""
    step = f"step of resnet18, {BATCH} of {IMAGE} × {IMAGE}"
    text = "{step_ms:.2f} ms, {ratio:.2f} ({0:.2f} to {1:.2f})"
    rows = []
    for name, formats in {**results["layers"], step: results["steps"]}.items():
        found = [formats[how]["variants"][SYNC] for how in FORMATS if how in formats]
        rows.append((name, *(text.format(*row["ratio_interval"], **row) for row in found)))
    return rows


def main() -> None:
    parser = Parser(__doc__)
    quick = "the small layers and one step, once each, to see that it runs"
    add_effort(parser, quick, "few rounds")
    add_device(parser, "both ranks share the GPUs, by way of gloo")
    args = parser.parse_args()
    require_device(args.device)
    where = provenance(args.device, world_size=RANKS, threads_a_rank=1)  # before there is load
    first, _ = start(RANKS, measure, most_rounds(args), device=args.device)
    print(f"{SYNC} by hand, and the ratio to {PLAIN} of the local batch:")
    print(tabulate(rows_of(first), ["", *FORMATS], disable_numparse=True))
    for kind, counts in first["collectives_a_step"].items():
        print(f"collectives of a step of resnet18 with {kind}: {counts}")
    print("bytes of statistics a rank shares in a step:", first["statistics_bytes_a_step"])
    keep(args, "05_sync_batchnorm", {"provenance": where, **first})


if __name__ == "__main__":
    with usage_errors_exit():
        main()
