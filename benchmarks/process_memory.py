"""What the memory of a GPU, or of a process, is spent on: every stage, every saving, foreseen.

    python benchmarks/process_memory.py

Bytes of tensors are counted: what a process holds when the loss of a step is there, and the most
that torch's allocator gave at a time, as ledger.py of stage 01 reads it. On a GPU that is
torch.cuda.max_memory_allocated; no GPU has run this yet. A CPU process itself is mostly PyTorch:
that is shown too. The replicas of stage 02 are virtual: all on one device. Ranks are processes;
with --device cuda they share the GPUs by way of gloo.
"""

import gc
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from common.options import Parser, usage_errors_exit
from common.record import peak_memory_bytes

from timing import add_device, chapter, provenance, require_device, save

ledger: Any = chapter("01", "ledger")
memory: Any = chapter("02", "memory")
peak: Any = chapter("01", "peak")
start = chapter("03", "ranks").start

MIB = 2**20
MODEL, SIZE, BATCH = "resnet18", 64, 64  # pixels; the global batch
OTHERS = {"net-bn": 28, "resnet50": 64}  # models that are foreseen too, unless --brief; pixels
RANKS, WORLDS, STEPS = 2, (1, 2, 4, 8), 2  # the first step leaves behind what the second finds
STAGES = {
    "01": "01 one process",
    "02": "02 DataParallel",
    "03": "03 by hand",
    "04": "04 DDP",
    "05": "05 DDP, SyncBN",
    "05 bf16": "05 in bf16",
}
KINDS = (  # of what a process holds; gradients that are views of a bucket count as bucket
    *("parameters", "buffers", "gradients", "buckets", "optimiser"),
    *("batch", "activations", "outputs and loss"),
)

Held = dict[str, int]  # the bytes of each kind
Batch = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Way:
    """A step under DDP with Adam, and what it does to hold less."""

    view: bool = False  # gradients are views of the buckets
    bf16: bool = False
    accumulate: int = 1
    in_place: bool = False  # zero_grad(set_to_none=False)
    zero: bool = False  # each rank keeps the optimiser's state of its share: ZeRO's first stage


WAYS = {
    "DDP with Adam": Way(),
    "bf16 autocast": Way(bf16=True),
    "accumulate 4": Way(accumulate=4),
    "views of the buckets": Way(view=True),
    "views, accumulate 4": Way(view=True, accumulate=4),
    "the same, zeroed in place": Way(view=True, accumulate=4, in_place=True),
    "ZeRO-1": Way(zero=True),
    "all together": Way(view=True, bf16=True, accumulate=4, in_place=True, zero=True),
}


# Ranks that begin with the same weights need not send them. They would pass through a buffer as
# large as all of them, and gloo's thread may be the one to free it: the profiler does not see that.
Unsent = partial(DistributedDataParallel, init_sync=False)


def make_batch(samples: int, size: int) -> Batch:
    return torch.randn(samples, 3, size, size), torch.arange(samples) % 10


def watch_buckets(ddp: DistributedDataParallel) -> dict[int, int]:
    """From now on: where each bucket begins, and its bytes. No bucket is kept alive by it."""
    buckets: dict[int, int] = {}

    def note(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # those of the step before: the layout may be another one
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(ddp.process_group, note)
    return buckets


def count(
    model: nn.Module, wrapped: nn.Module, optimizer: Any, buckets: dict[int, int], batch: Batch
) -> Held:
    """What this process holds after a forward and the loss; what two tensors share counts once."""
    saved: dict[str, list[Tensor]] = {"activations": [], "loss": []}
    with memory.saving_to(saved["activations"]):
        outputs = wrapped(batch[0])
    with memory.saving_to(saved["loss"]):
        loss = F.cross_entropy(outputs, batch[1])
    size, parameters, buffers = memory.size, list(model.parameters()), list(model.buffers())
    gradients = [p.grad for p in parameters if p.grad is not None]
    apart = [g for g in gradients if g.untyped_storage().data_ptr() not in buckets]
    update = getattr(optimizer, "optim", optimizer)  # of ZeRO: that of its share
    state = [value for each in update.state.values() for value in each.values()]
    fixed = [*parameters, *buffers, *batch]
    return {
        "parameters": size(parameters),
        "buffers": size(buffers),
        "gradients": size(apart),
        "buckets": sum(buckets.values()),
        "optimiser": size(value for value in state if isinstance(value, Tensor)),
        "batch": size(batch),
        "activations": size(saved["activations"], fixed),
        "outputs and loss": size([outputs, loss, *saved["loss"]], [*fixed, *saved["activations"]]),
    }


def train(way: Way, ddp: DistributedDataParallel, optimizer: Any, batch: Batch) -> None:
    """Steps in the order of stage 04's, with micro-batches and autocast as in stage 05's."""
    device, k = batch[0].device.type, way.accumulate
    for _ in range(STEPS):
        for part, (x, y) in enumerate(zip(batch[0].chunk(k), batch[1].chunk(k), strict=True)):
            with nullcontext() if part == k - 1 else ddp.no_sync():
                with torch.autocast(device, torch.bfloat16, enabled=way.bf16):
                    loss = F.cross_entropy(ddp(x), y) / k
                if part == 0:
                    optimizer.zero_grad(set_to_none=not way.in_place)
                loss.backward()
        optimizer.step()


def run_way(way: Way, plan: Any, samples: int) -> dict[str, Any]:
    """Train this rank in that way; what it holds, and its peak."""
    made: dict[str, Any] = {}

    def go() -> None:
        torch.manual_seed(0)
        model, optimizer = plan.build()
        batch = make_batch(samples, plan.image_size)
        ddp = Unsent(model, gradient_as_bucket_view=way.view)
        # After its first backward DDP lays out its buckets again, and holds both layouts for a
        # moment (pytorch pull request 41954). Here it does so before the first step.
        ddp.eval()(batch[0][:1]).sum().backward()
        model.zero_grad()
        ddp.train()
        buckets = watch_buckets(ddp)
        if way.zero:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=1e-3)
        train(way, ddp, optimizer, batch)
        made.update(model=model, wrapped=ddp, optimizer=optimizer, buckets=buckets, batch=batch)

    most = ledger.measure(plan.device, go)
    made["batch"] = tuple(part[: samples // way.accumulate] for part in made["batch"])
    with torch.autocast(plan.device, torch.bfloat16, enabled=way.bf16):
        found = {"held": count(**made), "peak_bytes": most}
    made.clear()
    gc.collect()  # DDP and its model hold each other
    return found


def run_ways(ways: list[Way], plan: Any, samples: int) -> list[dict[str, Any]]:
    """What each rank does."""
    return [run_way(way, plan, samples) for way in ways]


def predict(way: Way, plan: Any, samples: int, ranks: int) -> int:
    """The peak of a rank, foreseen without a rank: stage 01's rehearsal, and what DDP changes."""
    parts, micro = peak.parts_of(plan), samples // way.accumulate
    most = peak.rehearse(plan, micro, way.accumulate)[0]
    most += (samples - micro) * 4 * plan.channels * plan.image_size**2  # images that wait
    if not way.view or (way.accumulate > 1 and not way.in_place):
        most += parts["gradients"]  # in the buckets: once more
    elif way.accumulate == 1:
        most += largest_gradient(plan)  # each is made apart, then copied to its bucket
    if way.zero:
        most -= round(parts["optimiser state"] * (1 - 1 / ranks))
    if way.bf16:
        most += saved_bytes(plan, micro, True) - saved_bytes(plan, micro, False)
    return most


def largest_gradient(plan: Any) -> int:
    with torch.device("meta"):
        return max(parameter.nbytes for parameter in plan.build()[0].parameters())


def saved_bytes(plan: Any, samples: int, bf16: bool) -> int:
    """Bytes that autograd saves of a batch, from what two tiny batches take.

    The meta device knows no autocast: these two forwards are real ones.
    """
    with torch.device(plan.device), torch.autocast(plan.device, torch.bfloat16, enabled=bf16):
        model, _ = plan.build()
        fixed, found = [*model.parameters(), *model.buffers()], []
        for few in (2, 3):
            kept: list[Tensor] = []
            with memory.saving_to(kept):
                plan.loss(model, few)
            found.append(memory.size(kept, fixed))
    return found[0] + (samples - 2) * (found[1] - found[0])


def run_stage(key: str, plan: Any, global_batch: int) -> dict[str, Any]:
    """Some steps of a stage's own train_epoch, in a process that does nothing else."""
    number, _, amp = key.partition(" ")
    cpu, made = torch.device("cpu"), dict[str, Any]()
    resident = [peak_memory_bytes(cpu)]
    stage: Any = chapter(number, "train")

    def go() -> None:
        torch.manual_seed(0)
        model, optimizer = plan.build()
        batch = make_batch(global_batch // dist.get_world_size(), plan.image_size)
        wrapped, more = prepare(stage, number, amp, model, optimizer, batch[0].device)
        buckets = watch_buckets(wrapped) if isinstance(wrapped, DistributedDataParallel) else {}
        stage.train_epoch(wrapped, [batch] * STEPS, *more)
        made.update(model=model, wrapped=wrapped, optimizer=optimizer, buckets=buckets, batch=batch)

    most = ledger.measure(plan.device, go)
    resident.append(peak_memory_bytes(cpu))
    if number == "02":
        held = count_replicas(made["model"], made["batch"], RANKS)
    else:
        with torch.autocast(plan.device, torch.bfloat16, enabled=amp == "bf16"):
            held = [count(**made)]
    return {"held": held, "peak_bytes": most, "resident_bytes": resident}


def prepare(
    stage: Any, number: str, amp: str, model: nn.Module, optimizer: Any, device: torch.device
) -> tuple[nn.Module, list]:
    """The model as the stage prepares it, and what train_epoch takes besides the batches."""
    if number == "02":
        model = stage.DataParallel(model, [device] * RANKS)
    if number == "04":
        model = Unsent(model)
    if number < "05":
        return model, [optimizer, device]
    with mock.patch.object(sys, "argv", ["train.py", "--amp", amp or "off"]):
        args = stage.parse_args()
    gpu = device.type == "cuda"
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if gpu else stage.convert(model)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    more = [[args.lr] * STEPS, optimizer, scaler, device, args]
    return Unsent(model, gradient_as_bucket_view=True), more


def count_replicas(model: nn.Module, batch: Batch, replicas: int) -> list[Held]:
    """What each virtual replica of DataParallel holds, by stage 02's own count."""
    buffers = memory.size(model.buffers())
    found = []
    for each in memory.count((model, *batch), replicas, inside=False):
        outputs = each.pop("outputs") + each.pop("loss")
        each["parameters"] -= buffers
        found.append({**each, "buffers": buffers, "buckets": 0, "outputs and loss": outputs})
    return found


def measure_stages(plan: Any, batch: int, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """Each stage on RANKS replicas or ranks, with the same global batch."""
    found = {}
    for key in chosen:
        ranks = 1 if key in ("01", "02") else RANKS
        answers = start(ranks, run_stage, key, plan, batch, device=plan.device, quiet=True)
        found[key] = {
            "held": [held for answer in answers for held in answer["held"]],
            "peak_bytes": [answer["peak_bytes"] for answer in answers],  # of each process
            "resident_bytes": [answer["resident_bytes"] for answer in answers],  # before, after
        }
    return found


def measure_worlds(plan: Any, batch: int, worlds: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """DataParallel and DDP with the same global batch, on more and more replicas or ranks."""
    found = {}
    with torch.device(plan.device):
        model, _ = plan.build()
        whole = make_batch(batch, plan.image_size)
    for world in worlds:
        ranks = start(world, run_stage, "04", plan, batch, device=plan.device, quiet=True)
        found[str(world)] = {
            "DataParallel": count_replicas(model, whole, world),
            "DDP": [rank["held"][0] for rank in ranks],
            "peak_bytes": [rank["peak_bytes"] for rank in ranks],
            "predicted_bytes": predict(Way(), plan, batch // world, world),
        }
    return found


def measure_ways(plan: Any, samples: int, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """Each way to hold less, on the same ranks one after the other; samples: the local batch."""
    ways = [WAYS[name] for name in chosen]
    ranks = start(RANKS, run_ways, ways, plan, samples, device=plan.device, quiet=True)
    return {
        name: {
            "held": [rank[place]["held"] for rank in ranks],
            "peak_bytes": [rank[place]["peak_bytes"] for rank in ranks],
            "predicted_bytes": predict(way, plan, samples, RANKS),
        }
        for place, (name, way) in enumerate(zip(chosen, ways, strict=True))
    }


def measure(brief: bool, device: str) -> dict[str, Any]:
    """All of it, for one model; if not brief, other models are foreseen and measured too."""
    local = BATCH // RANKS
    momentum, adam = (peak.Plan(MODEL, SIZE, name, device) for name in ("momentum", "adam"))
    stages = measure_stages(momentum, BATCH, list(STAGES))
    worlds = measure_worlds(momentum, BATCH, WORLDS)
    ways = measure_ways(adam, local, list(WAYS))
    foreseen = {
        STAGES["01"]: compare(peak.rehearse(momentum, BATCH)[0], stages["01"]),
        STAGES["03"]: compare(peak.rehearse(momentum, local)[0], stages["03"]),
        **{
            f"04 DDP, {n} rank{'s' * (n != '1')}": compare(w["predicted_bytes"], w)
            for n, w in worlds.items()
        },
        **{name: compare(way["predicted_bytes"], way) for name, way in ways.items()},
    }
    for model, size in {} if brief else OTHERS.items():
        other = measure_ways(peak.Plan(model, size, "adam", device), local, list(WAYS))
        for name, way in other.items():
            foreseen[f"{model}: {name}"] = compare(way["predicted_bytes"], way)
    return {
        "model": MODEL,
        "image_size": SIZE,
        "global_batch": BATCH,
        "ranks": RANKS,
        "device": device,
        "stages": stages,
        "worlds": worlds,
        "ways": ways,
        "foreseen": foreseen,
    }


def compare(predicted: int, measured: dict[str, Any]) -> dict[str, float]:
    """The prediction beside the largest peak of the processes, and how far it is off."""
    most = max(measured["peak_bytes"])
    percent = round(100 * (predicted / most - 1), 2)
    return {"predicted_bytes": predicted, "measured_bytes": most, "percent_off": percent}


def table(rows: dict[str, list[Held]]) -> str:
    """What each process holds, in MiB; equal processes in one line."""
    lines = []
    for name, processes in rows.items():
        sizes = [
            [f"{held.get(kind, 0) / MIB:.1f}" for kind in KINDS]
            + [f"{sum(held.values()) / MIB:.1f}"]
            for held in processes
        ]
        for number, cells in enumerate(sizes):
            if cells not in sizes[:number]:
                lines.append((name, f"{number} (× {sizes.count(cells)})", *cells))
    heads = ("", "process", *KINDS, "held")
    return tabulate(lines, heads, disable_numparse=True, colalign=("left", *["right"] * 10))


def report(found: dict[str, Any]) -> None:
    """Tables of what is held, in MiB, and of what was foreseen."""
    print(table({STAGES[key]: stage["held"] for key, stage in found["stages"].items()}) + "\n")
    for how in ("DataParallel", "DDP"):
        print(table({f"{how}, {n}": each[how] for n, each in found["worlds"].items()}) + "\n")
    print(table({name: way["held"] for name, way in found["ways"].items()}) + "\n")
    rows = [
        (name, row["predicted_bytes"] / MIB, row["measured_bytes"] / MIB, row["percent_off"])
        for name, row in found["foreseen"].items()
    ]
    print(tabulate(rows, ("peak, MiB", "predicted", "measured", "% off"), floatfmt=".1f"))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--brief", action="store_true", help="one model only")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go, as JSON")
    add_device(parser, "all ranks share the GPUs, by way of gloo")
    args = parser.parse_args()
    require_device(args.device)
    torch.set_num_threads(1)
    where = provenance(args.device, world_size=RANKS, threads_a_rank=1)  # before there is load
    found = {"provenance": where, **measure(args.brief, args.device)}
    report(found)
    if args.out:
        save(args.out, found)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
