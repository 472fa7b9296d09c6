"""Time a training step with each reducer of stage 03, with DDP, and with no averaging at all.

    python benchmarks/reducers.py

All variants live in the same two ranks, one thread each, and take turns (timing.py). A step is
forward, backward, averaging and optimizer; its time is that of the slower rank. The baseline only
computes: its ranks never wait for each other. Then the ring against gloo's own all-reduce.
Writes 03_reducers.json and .png under results/, with --device cuda 03_reducers_cuda.
"""

import copy
import warnings
from collections.abc import Callable
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

from common.models import Net
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
    table,
)

RANKS = 2
COMPUTE = "compute only"
DDP: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, once more": {},
    "DDP, gradients as views": {"gradient_as_bucket_view": True},
    "DDP, static graph": {"static_graph": True},
}
SIZES = [2**power for power in range(16, 27)]  # bytes, 64 KiB to 64 MiB

start = chapter("03", "ranks").start
ring_all_reduce = chapter("03", "ring").ring_all_reduce
REDUCERS = chapter("03", "reducers").REDUCERS


def build(name: str) -> tuple[nn.Module, Tensor, int, int]:
    """A model, a local batch for it, and how many rounds of how many steps are enough."""
    torch.manual_seed(0)
    if name == "net":
        return Net(1, 28, 10, batch_norm=False), torch.randn(64, 1, 28, 28), 31, 15
    if name == "mlp":
        wide, hidden = nn.Linear(784, 2048), nn.Linear(2048, 2048)
        model = nn.Sequential(nn.Flatten(), wide, nn.ReLU(), hidden, nn.ReLU(), nn.Linear(2048, 10))
        return model, torch.randn(64, 1, 28, 28), 25, 4
    return torchvision.models.resnet18(num_classes=10), torch.randn(32, 3, 64, 64), 15, 1


def step_of(variant: str, model: nn.Module, batch: Tensor) -> Callable[[], None]:
    """What one step of this variant does, with a model of its own."""
    model = copy.deepcopy(model)
    wrapped, finish = model, lambda: None
    if variant in DDP:
        # Without its broadcast of BatchNorm's statistics at each forward: the reducers have none.
        # Newer torch has another name for the switch, and says so; torch 2.11 has only this one.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False, **DDP[variant])
    elif variant in REDUCERS:
        finish = REDUCERS[variant](model).finish
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    labels = torch.arange(len(batch)) % 10

    def step() -> None:
        loss = F.cross_entropy(wrapped(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        finish()
        optimizer.step()

    return step


def time_steps(model_name: str, most: int) -> dict[str, Any]:
    model, batch, rounds, steps = build(model_name)
    rounds, steps = min(rounds, most), 1 if most == 1 else steps
    names = [n for n in (COMPUTE, *REDUCERS, *DDP) if not (batch.is_cuda and n == "shared-memory")]
    variants = {name: step_of(name, model, batch) for name in names}
    times = interleave(variants, rounds, steps, warm_up=min(3, most), meet=dist.barrier)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "local_batch": len(batch),
        "rounds": len(times[SAME]),
        "steps_a_round": steps,
        "variants": summarize(of_the_slowest(times)),
    }


def time_ring(most: int) -> list[dict[str, float]]:
    """Bus bandwidth: bytes that each rank must send, 2 (n - 1) / n of the tensor, by the time."""
    rows = []
    for size in SIZES[:3] if most == 1 else SIZES:
        tensor = torch.zeros(size // 4)
        both = {
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor),
            "ring": lambda tensor=tensor: ring_all_reduce(tensor),
        }
        rounds, steps = min(25, most), 1 if most == 1 else max(1, 2**23 // size)
        times = interleave(both, rounds, steps, meet=dist.barrier)
        found = summarize(of_the_slowest(times))
        sent = 2 * (RANKS - 1) / RANKS * size
        low, high = found["ring"]["ratio_interval"]
        rows.append(
            {
                "bytes": size,
                **{f"{n}_bytes_per_second": round(sent / found[n]["step_ms"] * 1000) for n in both},
                "ring_to_gloo": round(1 / found["ring"]["ratio"], 4),
                "ring_to_gloo_interval": [round(1 / high, 4), round(1 / low, 4)],
                "gloo_to_gloo": round(1 / found[SAME]["ratio"], 4),
            }
        )
    return rows


def measure(most: int) -> dict[str, Any]:
    """What each rank does. most: rounds; with a single one, only of `net`."""
    names = ("net",) if most == 1 else ("net", "mlp", "resnet18")
    models = {name: time_steps(name, most) for name in names}
    return {"models": models, "ring": time_ring(most)}


def draw(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axis, (name, found) in zip(axes.flat, results["models"].items(), strict=False):
        rows = {v: r for v, r in found["variants"].items() if v not in (COMPUTE, SAME)}
        ratios = [row["ratio"] for row in rows.values()]
        ends = [[abs(e - row["ratio"]) for e in row["ratio_interval"]] for row in rows.values()]
        colors = ["#0072B2" if v in REDUCERS else "#999999" for v in rows]
        axis.barh(list(rows), ratios, color=colors, xerr=list(zip(*ends, strict=True)))
        axis.axvline(1, color="black", linewidth=1)
        axis.set(title=f"{name}, {found['parameters']:,} parameters")
        axis.set(xlabel="time of a step / time of computing only")
        axis.invert_yaxis()
    axis = axes.flat[-1]
    sizes = [row["bytes"] / 2**20 for row in results["ring"]]
    lines = ("gloo", "gloo's own", "#999999", "s"), ("ring", "our ring", "#0072B2", "o")
    for who, label, color, mark in lines:
        rates = [row[f"{who}_bytes_per_second"] / 1e9 for row in results["ring"]]
        axis.plot(sizes, rates, color=color, marker=mark, label=label)
    axis.set(title="All-reduce alone", xlabel="size of the tensor, MiB", xscale="log")
    axis.set(ylabel="bus bandwidth, GB/s", ylim=(0, None))
    axis.legend()
    figure.suptitle(
        f"{RANKS} ranks, one thread each, {results['provenance']['hardware']}. "
        "Blue: by hand; grey: torch's; black lines: 95 % intervals"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = Parser(__doc__)
    add_effort(parser, "one step of `net` with each, to see that it runs", "few rounds")
    add_device(parser, "all ranks share the GPUs, by way of gloo")
    args = parser.parse_args()
    require_device(args.device)
    where = provenance(args.device, world_size=RANKS, threads_a_rank=1)  # before there is load
    first, _ = start(RANKS, measure, most_rounds(args), device=args.device)
    for name, found in first["models"].items():
        print(f"\n{name}\n{table(found['variants'])}")
    print("\n" + tabulate(first["ring"], headers="keys"))
    keep(args, "03_reducers", {"provenance": where, **first}, draw)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
