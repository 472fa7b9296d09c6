"""Time each speed switch of DDP alone and all together, with what it costs: memory, bits, accuracy.

    python benchmarks/switches.py

Two ranks, one thread each, over gloo; on GPUs over nccl, with as many ranks as GPUs. All variants
live in the same ranks and take turns (timing.py); a step is forward, backward, averaging and
optimizer, and its time is that of the slower rank. Memory is counted by storages: what a rank holds
between two steps. A variant with other bits than plain DDP is trained, for its test accuracy.
Writes 05_switches.json and .png under results/, on GPUs 05_switches_cuda.
"""

import copy
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from common.models import Net
from common.options import Parser, usage_errors_exit

from accuracy import learn
from timing import (
    SAME,
    add_device,
    add_effort,
    chapter,
    interleave,
    keep,
    most_rounds,
    of_all_ranks,
    of_the_slowest,
    provenance,
    require_device,
    summarize,
)

RANKS, BATCH, SIZE = 2, 32, 64  # on a CPU; of a rank; pixels
GPU_BATCH, GPU_SIZE = 128, 224
COMPARED = 5  # steps, after which the weights are compared

Batch = tuple[Tensor, Tensor]  # images and labels

start = chapter("03", "ranks").start
bytes_of = chapter("02", "memory").size  # of the storages of some tensors, each once
stage_05 = chapter("05", "switches")  # the switches that a reader adds to train.py


@dataclass(frozen=True)
class Switches:
    """How a variant differs from plain DDP."""

    ddp: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    compiled: bool = False
    cudnn_benchmark: bool = False
    fused: bool = False
    autocast: bool = False
    hook: str = ""
    optimiser: str = "sgd"
    idle_branch: bool = False  # the model has a layer that no step uses
    baseline: str = "DDP"


FIND, VIEW = {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}
TOGETHER: dict[str, Any] = {"channels_last": True, "fused": True, "autocast": True, "hook": "bf16"}
VARIANTS = {
    "DDP": Switches(),
    "channels_last": Switches(channels_last=True),
    "torch.compile": Switches(compiled=True),
    "cudnn.benchmark": Switches(cudnn_benchmark=True),
    "gradient_as_bucket_view": Switches(VIEW),
    "static_graph": Switches({"static_graph": True}),
    "fused optimiser": Switches(fused=True),
    "bf16 autocast": Switches(autocast=True),
    "bf16 hook": Switches(hook="bf16"),
    # With several buckets over gloo, PowerSGD aborts: see links.py. So it gets a single one.
    "PowerSGD hook": Switches({"bucket_cap_mb": 100}, hook="PowerSGD"),
    "all but compile": Switches({**VIEW, "static_graph": True}, **TOGETHER),
    "all together": Switches(VIEW, compiled=True, cudnn_benchmark=True, **TOGETHER),
    "find_unused_parameters": Switches(FIND),
    "the same, with an idle branch": Switches(FIND, idle_branch=True),
    "Adam": Switches(optimiser="adam"),
    "Adam, ZeroRedundancyOptimizer": Switches(optimiser="zero adam", baseline="Adam"),
}


def choose(device: str, quick: bool) -> tuple[dict[str, Switches], dict[str, str]]:
    """The variants that this device can show, and why each other one is left out."""
    skipped = {}
    if device == "cpu":
        skipped["cudnn.benchmark"] = "cuDNN is for GPUs: on a CPU the switch does nothing"
    if quick:
        skipped |= {
            name: "--quick or --brief" for name, switches in VARIANTS.items() if switches.compiled
        }
    return {name: s for name, s in VARIANTS.items() if name not in skipped}, skipped


class WithIdleBranch(nn.Module):
    """A model with one more layer that no step uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.idle = model, nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Training:
    """A model of its own under DDP, with some switches on; call it for one step.

    watched: keep the buckets of the last step, so that they can be counted.
    """

    def __init__(
        self, switches: Switches, model: nn.Module, device: torch.device, watched: bool = False
    ) -> None:
        self.switches, self.device = switches, device
        self.layout = torch.channels_last if switches.channels_last else torch.contiguous_format
        self.plain = copy.deepcopy(model).to(device).train()
        if switches.channels_last:
            stage_05.channels_last(self.plain)
        if switches.compiled:
            torch._dynamo.config.recompile_limit = 64  # of one forward, in several variants
            stage_05.compiled(self.plain, dynamic=False)  # in DDP, it cuts where a bucket ends
        inner = WithIdleBranch(self.plain).to(device) if switches.idle_branch else self.plain
        self.ddp = DistributedDataParallel(inner, **switches.ddp)  # every rank must reach this line
        self.buckets: dict[int, Tensor] = {}
        self.power = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        if switches.hook or watched:
            self.ddp.register_comm_hook(*self.make_hook(watched))
        if switches.optimiser == "zero adam":  # each rank keeps the state of its share
            self.optimizer: Any = ZeroRedundancyOptimizer(inner.parameters(), Adam, lr=1e-3)
        elif switches.optimiser == "adam":
            self.optimizer = Adam(inner.parameters(), lr=1e-3)
        else:
            fused = {"fused": True} if switches.fused else {}
            self.optimizer = SGD(inner.parameters(), lr=0.02, momentum=0.9, **fused)

    def make_hook(self, watched: bool) -> tuple[Any, Callable]:
        """A state and what DDP calls for each bucket, instead of an all-reduce of its own."""
        hooks: dict[str, Callable]
        hooks = {**stage_05.HOOKS, "PowerSGD": powerSGD_hook, "": allreduce_hook}
        inner = hooks[self.switches.hook]
        state = self.power if self.switches.hook == "PowerSGD" else None

        def keep(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            self.buckets[bucket.index()] = bucket.buffer()
            return inner(state, bucket)

        return state, keep if watched else inner

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        torch.backends.cudnn.benchmark = self.switches.cudnn_benchmark
        self.buckets.clear()  # DDP lays them out again after its first backward
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.switches.autocast):
            loss = F.cross_entropy(self.ddp(images), labels)
        loss.backward()
        self.optimizer.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.plain.parameters()])

    def held_bytes(self) -> dict[str, int]:
        """What this rank holds between two steps, by its storages."""
        parameters = list(self.ddp.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        update = getattr(self.optimizer, "optim", self.optimizer)  # of ZeRO: that of its share
        state = [value for each in update.state.values() for value in each.values()]
        tables = self.power.error_dict, self.power.p_memory_dict, self.power.q_memory_dict
        return {
            "parameters": bytes_of([*parameters, *self.ddp.buffers()]),
            "gradients and buckets": bytes_of([*gradients, *self.buckets.values()]),
            "optimiser": bytes_of(value for value in state if isinstance(value, Tensor)),
            "hook": bytes_of(tensor for table in tables for tensor in table.values()),
        }


def laid_out(batch: Batch, layout: torch.memory_format) -> Batch:
    images, labels = batch
    return images.to(memory_format=layout), labels


def time_steps(
    chosen: dict[str, Switches], model: nn.Module, batch: Batch, device: torch.device, rounds: int
) -> dict[str, dict[str, Any]]:
    """The step of each variant; its ratio to its baseline."""
    trainings = {name: Training(switches, model, device) for name, switches in chosen.items()}
    steps: dict[str, Callable[[], object]] = {
        name: partial(one, *laid_out(batch, one.layout)) for name, one in trainings.items()
    }
    warm_up, repeats = (4 if rounds > 1 else 1), (10 if device.type == "cuda" else 1)
    times = interleave(steps, rounds, repeats, warm_up, meet=dist.barrier)
    times = of_the_slowest(times)
    summaries = {base: summarize(times, base) for base in {s.baseline for s in chosen.values()}}
    baselines = {name: switches.baseline for name, switches in chosen.items()} | {SAME: "DDP"}
    return {name: {"baseline": b, **summaries[b][name]} for name, b in baselines.items()}


def count_and_compare(
    chosen: dict[str, Switches], model: nn.Module, batch: Batch, device: torch.device
) -> dict[str, dict[str, Any]]:
    """What a rank holds, and how far its weights are from the baseline's after a few steps.

    The distance is a part of the way that the training has gone. 0 means: the same bits.
    """
    first = torch.cat([p.detach().flatten() for p in model.parameters()]).to(device)
    weights: dict[str, Tensor] = {}
    rows = {}
    for name, switches in [*chosen.items(), (SAME, VARIANTS["DDP"])]:
        training = Training(switches, model, device, watched=True)
        for group in training.optimizer.param_groups:
            group["lr"] = 1e-3  # small steps: large ones would blow up the last bit of a number
        for _ in range(COMPARED):
            training(*laid_out(batch, training.layout))
        weights[name] = training.weights()
        base = weights["DDP" if name == SAME else switches.baseline]
        far = ((weights[name] - base).norm() / (base - first).norm()).item()
        held = training.held_bytes()
        most = map(int, of_all_ranks(list(held.values())))
        rows[name] = {
            "distance": of_all_ranks([far])[0],
            "held_bytes": dict(zip(held, most, strict=True)),
        }
    return rows


def add_accuracies(
    rows: dict[str, dict[str, Any]], device: torch.device, seeds: int, steps: int | None
) -> None:
    """Train with each variant that has other bits than its baseline; the others learn the same.

    Without seeds nothing is trained, and all accuracies are None.
    """
    for name, row in rows.items():
        row["accuracy_of"] = name if row["distance"] or name == "DDP" else row["baseline"]
        if row["accuracy_of"] == name:
            prepare = partial(Training, VARIANTS[name], device=device)
            found = [learn(prepare, seed, device, steps) for seed in range(seeds)]
            row["test_accuracies"] = [round(each, 4) for each in found]
            row["accuracy"] = statistics.median(row["test_accuracies"]) if found else None
    for row in rows.values():
        row["accuracy"] = rows[row["accuracy_of"]]["accuracy"]


def measure(chosen: list[str], most: int) -> dict[str, Any]:
    """What each rank does. most: rounds; with a single one, only of a small network."""
    quick = most == 1
    gpu = torch.cuda.is_available() and torch.get_default_device().type == "cuda"
    device = torch.device("cuda" if gpu else "cpu")
    torch.set_default_device("cpu")  # data sets are read there
    batch, size = (GPU_BATCH, GPU_SIZE) if gpu else (2, 32) if quick else (BATCH, SIZE)
    # DDP puts the gradients of a channels_last model into its buckets as they come, and warns.
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    if quick:
        model = Net(3, size, 10, batch_norm=True)
    torch.manual_seed(1 + dist.get_rank())
    data = torch.randn(batch, 3, size, size), torch.arange(batch) % 10
    data = data[0].to(device), data[1].to(device)
    variants = {name: VARIANTS[name] for name in chosen}
    rows = time_steps(variants, model, data, device, min(15, most))
    for name, found in count_and_compare(variants, model, data, device).items():
        rows[name] |= found
    add_accuracies(rows, device, 1 if quick else 0 if most < 15 else 3, 2 if quick else None)
    return {
        "model": "resnet18",
        "parameters": sum(p.numel() for p in model.parameters()),
        "ranks": dist.get_world_size(),
        "local_batch": batch,
        "image_size": size,
        "variants": rows,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Left the time of each variant, with its accuracy; right what a rank holds."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 7), layout="constrained", sharey=True, width_ratios=(3, 2)
    )
    rows = {name: row for name, row in results["variants"].items() if name != SAME}
    ratios = [row["ratio"] for row in rows.values()]
    ends = [[abs(e - row["ratio"]) for e in row["ratio_interval"]] for row in rows.values()]
    colours = ["#D55E00" if row["distance"] else "#0072B2" for row in rows.values()]
    left.barh(list(rows), ratios, color=colours, xerr=list(zip(*ends, strict=True)))
    left.axvline(1, color="black", linewidth=1)
    for place, row in enumerate(rows.values()):
        end = max(row["ratio_interval"])
        left.text(end + 0.02, place, f"{row['accuracy']:.1%}", va="center", fontsize=8)
    left.set(xlabel="time of a step / that of plain DDP (of ZeroRedundancyOptimizer: of Adam)")
    left.set_title("Blue: the same bits as the baseline; orange: others. Beside it: test accuracy")
    left.set_xlim(0, 1.15 * max(max(row["ratio_interval"]) for row in rows.values()))
    left.invert_yaxis()
    starts = [0.0] * len(rows)
    kinds = next(iter(rows.values()))["held_bytes"]
    for kind, colour in zip(kinds, ("#0072B2", "#56B4E9", "#999999", "#CC79A7"), strict=True):
        widths = [row["held_bytes"][kind] / 2**20 for row in rows.values()]
        right.barh(list(rows), widths, left=starts, color=colour, label=kind)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    right.set(xlabel="MiB that a rank holds between two steps", xlim=(0, 1.15 * max(starts)))
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    size, threads = results["image_size"], results["provenance"].get("threads_a_rank")
    figure.suptitle(
        f"{results['model']}, {results['ranks']} ranks"
        f"{' of one thread' if threads == 1 else ''}, {results['local_batch']} pictures of "
        f"{size} × {size} each; {results['provenance']['hardware']}; black lines: 95 % intervals"
    )
    figure.savefig(path, dpi=110)


def distance(name: str, row: dict[str, Any]) -> str:
    """How far a variant's weights are from its baseline's, in words."""
    if name == "Adam":
        return "another optimiser"
    return f"{row['distance']:.0e}" if row["distance"] else "same bits"


def report(results: dict[str, Any]) -> None:
    rows = [
        (
            name,
            f"{row['step_ms']:.1f}",
            "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_interval"]),
            f"{sum(row['held_bytes'].values()) / 2**20:.0f}",
            distance(name, row),
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%}",
        )
        for name, row in results["variants"].items()
    ]
    heads = ("variant", "step, ms", "ratio", "MiB held", "distance", "accuracy")
    print(tabulate(rows, heads, disable_numparse=True))
    for what, why in results["skipped"].items():
        print(f"left out: {what}: {why}")


def main() -> None:
    parser = Parser(__doc__)
    quick = "one step of a small network, nothing compiled"
    add_effort(parser, quick, "few rounds, no training for an accuracy, nothing compiled")
    add_device(parser, "a rank on each GPU, over nccl")
    args = parser.parse_args()
    require_device(args.device)
    gpu = args.device == "cuda"
    chosen, skipped = choose(args.device, args.quick or args.brief)
    ranks, backend = (torch.cuda.device_count(), "nccl") if gpu else (RANKS, "gloo")
    where = provenance(args.device, world_size=ranks, threads_a_rank=1)  # before there is load
    what = list(chosen), most_rounds(args)
    first, *_ = start(ranks, measure, *what, backend=backend, device=args.device)
    results = {"provenance": where, "skipped": skipped, **first}
    report(results)
    keep(args, "05_switches", results, draw)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
