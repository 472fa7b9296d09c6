"""Time training in each precision, memory format, and with torch.compile; with its accuracy.

    python benchmarks/precision.py

A step is forward, loss, backward and the optimizer's step, on a batch that already lies on the
device: loading is not timed. One process has all cores of a CPU; of N ranks under DDP each has one
core and its share of the batch. All variants of a model take turns (timing.py). Each also trains
the same small network on the same digits from three seeds: none may win by learning less.
Writes 05_precision.json and .png under results/, on a GPU 05_precision_cuda.
"""

import copy
import gc
import os
import statistics
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.options import Parser, UsageError, cut_batch, number, usage_errors_exit

from accuracy import learn
from timing import (
    SAME,
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

COLOURS = {"fp32": "#999999", "tf32": "#E69F00", "bf16": "#0072B2", "fp16": "#009E73"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ONE = "one process"

start = chapter("03", "ranks").start
has_units = chapter("05", "machine").has_units
switches = chapter("05", "switches")
measure_bytes = chapter("01", "ledger").measure


@dataclass(frozen=True)
class Variant:
    precision: str  # fp32, tf32, bf16 or fp16
    channels_last: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        more = {"channels_last": self.channels_last, "compile": self.compiled}
        return ", ".join([self.precision, *(name for name, on in more.items() if on)])

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


def choose(device: torch.device, quick: bool) -> tuple[list[Variant], dict[str, str]]:
    """The variants that this device can show, and why each other one is left out."""
    skipped, kind = {}, "GPU" if device.type == "cuda" else "CPU"
    if device.type == "cpu":
        skipped["tf32"] = "a format of GPUs"
    for precision in DTYPES if skipped else ("tf32", *DTYPES):
        if not has_units(precision, device):
            skipped[precision] = f"this {kind} has no units that multiply in {precision}"
    precisions = [precision for precision in COLOURS if precision not in skipped]
    formats = [(False, False), (True, False), (True, True), (False, True)]
    if device.type == "cpu":
        formats.pop()
        skipped["compile without channels_last"] = "on a CPU, each compilation takes a minute"
    if quick:
        formats = formats[:2]
        skipped["compile"] = "--quick or --brief"
    return [Variant(p, *each) for p in precisions for each in formats], skipped


@contextmanager
def computing_in(variant: Variant, device: torch.device) -> Iterator[None]:
    """What is inside computes in the variant's precision."""
    if device.type == "cuda":  # the names that torch.compile reads too; the newer ones must not mix
        tf32 = variant.precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    dtype = DTYPES.get(variant.precision)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        yield


class Training:
    """A model of its own, its optimizer and a batch; call it for one step."""

    def __init__(self, variant: Variant, model: nn.Module, device: torch.device) -> None:
        self.variant, self.device, self.layout = variant, device, variant.layout
        self.plain = copy.deepcopy(model).to(device).train()
        if variant.channels_last:
            switches.channels_last(self.plain)
        if variant.compiled:
            torch._dynamo.config.recompile_limit = 64  # of one forward, in many variants
            switches.compiled(self.plain, dynamic=False)  # or shapes after the first are slower
        self.model: nn.Module = self.plain
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
        sgd = torch.optim.SGD(self.plain.parameters(), 0.02, 0.9, fused=True)
        self.optimizer: torch.optim.Optimizer = sgd
        self.scaler = torch.amp.GradScaler(device.type, enabled=variant.precision == "fp16")

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        with computing_in(self.variant, self.device):
            loss = F.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def peak_bytes(self, images: Tensor, labels: Tensor) -> int:
        """The most that a step holds at a time, as torch's allocator counts it, without the batch.

        It is what the model and the optimizer hold all the time, and what a step adds to it.
        """
        self.optimizer.zero_grad()
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        tensors = [*self.plain.parameters(), *self.plain.buffers(), *state]
        held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        if self.device.type == "cpu":
            return held + measure_bytes("cpu", lambda: self(images, labels))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self(images, labels)
        return held + torch.cuda.max_memory_allocated() - before


def time_model(
    name: str, variants: list[Variant], batch: int, size: int, device: str, rounds: int
) -> dict[str, Any]:
    """Step times, images a second and peak memory of each variant; on all ranks if there are any.

    batch: of this process.
    """
    where, world_size = torch.device(device), 1
    torch.backends.cudnn.benchmark = True  # all shapes stay the same
    # DDP puts the gradients of a channels_last model into its buckets as they come, and warns.
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    torch.manual_seed(0)
    model = torchvision.models.get_model(name)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    batches = {  # each layout once
        layout: (images.to(where, memory_format=layout), labels.to(where))
        for layout in {variant.layout for variant in variants}
    }
    trainings = {str(variant): Training(variant, model, where) for variant in variants}
    steps: dict[str, Callable[[], object]] = {
        label: partial(one, *batches[one.variant.layout]) for label, one in trainings.items()
    }
    if dist.is_initialized():
        world_size = dist.get_world_size()
    warm_up = 3 if rounds > 1 else 1
    together = {"meet": dist.barrier} if world_size > 1 else {}
    times = interleave(steps, rounds, 10 if device == "cuda" else 1, warm_up, **together)
    summary = summarize(of_the_slowest(times))
    for label, row in summary.items():
        row["images_per_second"] = round(world_size * batch / row["step_ms"] * 1000, 2)
        if label != SAME and world_size == 1:
            one = trainings[label]
            row["peak_bytes"] = one.peak_bytes(*batches[one.variant.layout])
    return {
        "ranks": world_size,
        "threads_a_rank": torch.get_num_threads(),
        "local_batch": batch,
        "rounds": len(times[SAME]),
        "variants": summary,
    }


def time_on_ranks(names: list[str], *args: Any) -> dict[str, Any]:
    """What each rank does."""
    torch.set_default_device("cpu")
    return {name: time_model(name, *args) for name in names}


def accuracies(
    variants: list[Variant], device: torch.device, seeds: int, steps: int | None
) -> dict[str, Any]:
    rows = {}
    for variant in variants:
        prepare = partial(Training, variant, device=device)
        found = [round(learn(prepare, seed, device, steps), 4) for seed in range(seeds)]
        rows[str(variant)] = {"test_accuracies": found, "median": statistics.median(found)}
        print(f"{variant!s:30} accuracy {found}", flush=True)
    return rows


def imitate(skipped: dict[str, str], device: torch.device, quick: bool) -> dict[str, Any]:
    """One convolution, forward and backward, in the formats that have no units here: ratio to fp32.

    So a reader sees why they are left out. Those that do not run at all have no entry.
    """
    layer, rows = nn.Conv2d(64, 64, 3, padding=1).to(device), {}
    images = torch.randn(2 if quick else 16, 64, 56, 56, device=device)

    def step(precision: str) -> None:
        with computing_in(Variant(precision), device):
            layer(images).float().sum().backward()

    for precision in DTYPES.keys() & skipped.keys():
        both = {name: partial(step, name) for name in ("fp32", precision)}
        with suppress(RuntimeError):  # this device does not compute in this format
            rows[precision] = summarize(interleave(both, 1 if quick else 5, 1, 1))[precision]
    return rows


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel for each model on one process and on ranks; accuracy and memory beside each bar."""
    models = results["models"]
    columns = max(len(found) for found in models.values())
    figure, axes = plt.subplots(
        len(models), columns, figsize=(7 * columns, 3.6 * len(models)), layout="constrained"
    )
    flat = iter(axes.flat if hasattr(axes, "flat") else [axes])
    for name, places in models.items():
        for place, found in places.items():
            axis = next(flat)
            rows = {v: row for v, row in found["variants"].items() if v != SAME}
            speeds = [row["images_per_second"] for row in rows.values()]
            colours = [COLOURS[variant.split(",")[0]] for variant in rows]
            ends = [  # of the ratio to fp32, drawn at the bar
                [
                    abs(row["images_per_second"] * (row["ratio"] / end - 1))
                    for end in reversed(row["ratio_interval"])
                ]
                for row in rows.values()
            ]
            lines = list(zip(*ends, strict=True))
            bars = axis.barh(list(rows), speeds, color=colours, xerr=lines)
            texts = [
                f"{1 / row['ratio']:.1f}×, {results['accuracy'][v]['median']:.1%}"
                for v, row in rows.items()
            ]
            axis.bar_label(bars, texts, padding=3, fontsize=8)
            axis.set(title=f"{name}, {place}", xlabel="images per second")
            axis.set_xlim(0, 1.3 * max(map(sum, zip(speeds, lines[1], strict=True))))
            axis.invert_yaxis()
    size, first = results["image_size"], next(iter(models.values()))
    batch = first[ONE]["local_batch"]
    figure.suptitle(
        f"Training with a global batch of {batch}, {size} × {size} pixels; "
        f"{results['provenance']['hardware']}\n"
        "beside each bar: times as fast as fp32 (black lines: 95 % interval), and the median test "
        "accuracy of a small training"
    )
    figure.savefig(path, dpi=110)


def report(results: dict[str, Any]) -> None:
    for name, places in results["models"].items():
        for place, found in places.items():
            rows = [
                (
                    variant,
                    f"{row['step_ms']:.1f}",
                    f"{row['images_per_second']:.1f}",
                    f"{1 / row['ratio']:.2f}",
                    f"{row['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in row else "",
                )
                for variant, row in found["variants"].items()
            ]
            heads = ("variant", "step, ms", "images/s", "× fp32", "peak, MiB")
            print(f"\n{name}, {place}, {found['threads_a_rank']} threads a rank")
            print(tabulate(rows, heads, disable_numparse=True), flush=True)
    for what, why in results["skipped"].items():
        print(f"left out: {what}: {why}")
    for precision, row in results["without_units"].items():
        print(f"a convolution in {precision}, without units for it: {row['ratio']:.0f} × fp32")


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add, count = parser.add_argument, number(int, 1)
    add("--models", nargs="+", default=["resnet18", "resnet50"], metavar="NAME", help="torchvision")
    add("--batch-size", type=count, metavar="N", help="global; 16 on a CPU, 256 a GPU if not said")
    add("--image-size", default=224, type=number(int, 32), metavar="N", help="pixels")
    add("--ranks", type=count, metavar="N", help="one for each core or GPU if not said")
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=gpu, choices=("cpu", "cuda"), help="cuda: if torch sees a GPU")
    brief = "few rounds; on a CPU one process, resnet18, one training for each accuracy"
    add_effort(parser, "small pictures, one step, nothing compiled", brief)
    args = parser.parse_args()
    require_device(args.device)
    unknown = sorted(set(args.models) - set(torchvision.models.list_models(torchvision.models)))
    if unknown:
        raise UsageError(f"torchvision has no model {unknown[0]}: try --models resnet50")
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if args.brief:  # a GPU is fast: the larger model
        args.models = ["resnet50"] if args.device == "cuda" else ["resnet18"]
        args.ranks = args.ranks or 1
    args.ranks = args.ranks or (gpus if args.device == "cuda" else cores)
    if args.device == "cuda" and args.ranks > gpus:
        raise UsageError(f"{args.ranks} ranks need as many GPUs, here are {gpus}: try --ranks 1")
    args.batch_size = args.batch_size or (256 * args.ranks if args.device == "cuda" else 16)
    if args.quick:
        args.models, args.batch_size, args.image_size = ["resnet18"], 2 * args.ranks, 32
    cut_batch(args.batch_size, args.ranks)
    return args


def measure(args: Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    variants, skipped = choose(device, args.quick or (args.brief and args.device == "cpu"))
    rounds = min(7 if args.device == "cpu" else 11, most_rounds(args))
    seeds = 1 if args.quick or args.brief else 3
    accuracy = accuracies(variants, device, seeds, 2 if args.quick else None)
    models: dict[str, dict[str, Any]] = {}
    local = args.batch_size // args.ranks
    alone = local if args.device == "cuda" else args.batch_size  # what one GPU does; all cores
    for name in args.models:
        gc.collect()
        models[name] = {
            ONE: time_model(name, variants, alone, args.image_size, args.device, rounds)
        }
    if args.ranks > 1:
        eager = [v for v in variants if not v.compiled]
        backend = "nccl" if args.device == "cuda" else "gloo"
        shared = (eager, local, args.image_size, args.device, rounds)
        found, *_ = start(
            args.ranks, time_on_ranks, args.models, *shared, backend=backend, device=args.device
        )
        for name, row in found.items():
            models[name][f"{args.ranks} ranks"] = row
        skipped["compile on several ranks"] = "see switches.py"
    else:
        skipped["several ranks"] = "there is one GPU" if args.device == "cuda" else "--ranks 1"
    return {
        "image_size": args.image_size,
        "skipped": skipped,
        "without_units": imitate(skipped, device, args.quick),
        "models": models,
        "accuracy": accuracy,
    }


def main() -> None:
    args = parse_args()
    if not args.quick:  # whatever OMP_NUM_THREADS says
        torch.set_num_threads(os.cpu_count() or 1)
    where = provenance(args.device)  # before there is load
    results = {"provenance": where, **measure(args)}
    report(results)
    keep(args, "05_precision", results, draw)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
