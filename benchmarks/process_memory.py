"""What the memory of a GPU, or of a process, is spent on: in every stage, and with every saving.

Bytes of tensors are counted: what a process holds when the loss of a step is there, and the most
that torch's allocator gave at one time, as peak.py of stage 01 reads it. The replicas of stage 02
are virtual: all on one device.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from plots import BLACK, BLUE, GRAY, GREEN, ORANGE, RED, SKY, YELLOW, Axes, patches
from step import start, train_step
from timing import Effort, Results, chapter

memory: Any = chapter("02", "memory")
peak: Any = chapter("01", "peak")

MIB = 2**20
RANKS, BATCH = 2, 64  # BATCH: the global one
ABOUT = "{model}, {image_size} pixels, global batch {global_batch}"
STAGES = {"01": "01 one process", "02": "02 DataParallel", "03": "03 by hand"}
STAGES |= {"04": "04 DDP", "05": "05 DDP, SyncBN", "05 bf16": "05 in bf16"}
# Colors and hatches of what is held, and of what is there for a moment.
STYLES = {"parameters": (BLUE, ""), "buffers": (BLACK, ""), "gradients": (SKY, "//")}
STYLES |= {"buckets": (ORANGE, "\\\\"), "optimizer": (GRAY, ".."), "batch": (YELLOW, "")}
STYLES |= {"activations": (GREEN, "xx"), "outputs and loss": (RED, ""), "at the peak": ("#EEE", "")}

UNSENT: Any = {"init_sync": False}  # or gloo frees a buffer as large as all weights, unseen


@dataclass(frozen=True)
class Way:
    """What a step under DDP with Adam does to hold less."""

    bf16: bool = False
    micro_batches: int = 1
    views: bool = False  # gradient_as_bucket_view
    zeroed_in_place: bool = False  # zero_grad(set_to_none=False)
    zero: bool = False  # each rank keeps the optimizer's state of its share: ZeRO's first stage


WAYS = {
    "DDP with Adam": Way(),
    "bf16 autocast": Way(bf16=True),
    "accumulate 4": Way(micro_batches=4),
    "views of the buckets": Way(views=True),
    "views, accumulate 4": Way(views=True, micro_batches=4),
    "the same, zeroed in place": Way(views=True, micro_batches=4, zeroed_in_place=True),
    "ZeRO-1": Way(zero=True),
    "all together": Way(True, 4, True, True, True),
}

Batch = tuple[Tensor, Tensor]  # images and labels
Held = dict[str, int]  # the bytes of each kind


def watch_buckets(ddp: nn.Module) -> dict[int, int]:
    """From now on: where each bucket of DDP begins, and its bytes."""
    buckets: dict[int, int] = {}

    def note(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # of the previous step: the layout may change
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(group, bucket)

    if isinstance(ddp, DistributedDataParallel):
        ddp.register_comm_hook(None, note)
    return buckets


def held_between_steps(model: nn.Module, optimizer: Any, buckets: dict[int, int]) -> Held:
    """Bytes of each kind; gradients that are views of a bucket count as bucket."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    apart = [g for g in gradients if g.untyped_storage().data_ptr() not in buckets]
    update = getattr(optimizer, "optim", optimizer)  # ZeRO: the state of its share
    state = [value for each in update.state.values() for value in each.values()]
    tensors = [value for value in state if isinstance(value, Tensor)]
    held = {"parameters": memory.size(model.parameters()), "buffers": memory.size(model.buffers())}
    held |= {"gradients": memory.size(apart), "buckets": sum(buckets.values())}
    return held | {"optimizer": memory.size(tensors)}


def count(model: nn.Module, wrapped: Any, optimizer: Any, buckets: Any, batch: Batch) -> Held:
    """What this process holds after a forward and the loss; what two tensors share counts once."""
    activations, of_loss = list[Tensor](), list[Tensor]()
    with memory.saving_to(activations):
        outputs = wrapped(batch[0])
    with memory.saving_to(of_loss):
        loss = nn.functional.cross_entropy(outputs, batch[1])
    fixed = [*model.parameters(), *model.buffers(), *batch]
    held = held_between_steps(model, optimizer, buckets)
    held |= {"batch": memory.size(batch), "activations": memory.size(activations, fixed)}
    of_outputs = memory.size([outputs, loss, *of_loss], [*fixed, *activations])
    return held | {"outputs and loss": of_outputs}


def count_replicas(model: nn.Module, batch: Batch, replicas: int) -> list[Held]:
    """What each virtual replica of DataParallel holds, by stage 02's own count."""
    buffers, found = memory.size(model.buffers()), memory.count((model, *batch), replicas, False)
    for each in found:
        each["outputs and loss"] = each.pop("outputs") + each.pop("loss")
        each["parameters"] -= buffers
        each |= {"buffers": buffers, "buckets": 0}
    return found


def make(plan: Any, samples: int) -> tuple[nn.Module, Any, Batch]:
    torch.manual_seed(0)
    images = torch.randn(samples, plan.channels, plan.image_size, plan.image_size)
    return *plan.build(), (images, torch.arange(samples) % plan.classes)


def train_way(way: Way, plan: Any, samples: int) -> tuple:
    """Two steps under DDP with Adam; the second finds what the first has left behind."""
    model, _, (images, labels) = make(plan, samples)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=way.views, **UNSENT)
    buckets = watch_buckets(ddp)
    optimizer: Any = Adam(model.parameters())
    if way.zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)
    # After its first backward DDP lays out its buckets again, and holds both layouts for a moment.
    ddp.eval()(images[:1]).sum().backward()
    time.sleep(0.05)  # gloo's thread lets go of the old layout, else it frees it later, unseen
    model.zero_grad()
    ddp.train()
    micro_batch = images.chunk(way.micro_batches)[0], labels.chunk(way.micro_batches)[0]
    how: Any = {"micro_batches": way.micro_batches, "zeroed_in_place": way.zeroed_in_place}
    for _ in range(2):
        train_step(ddp, optimizer, *micro_batch, dtype=torch.bfloat16 if way.bf16 else None, **how)
    return model, ddp, optimizer, buckets, micro_batch


def train_stage(key: str, plan: Any, samples: int, replicas: int) -> tuple:
    """Two steps; the model is prepared as the stage does it."""
    model, optimizer, batch = make(plan, samples)
    wrapped, finish = model, lambda: None
    if key == "02":
        wrapped = chapter("02", "from_scratch").DataParallel(model, [batch[0].device] * replicas)
    elif key == "03":
        finish = chapter("03", "reducers").PerParameter(model).finish
    elif key == "04":
        wrapped = DistributedDataParallel(model, **UNSENT)
    elif key != "01":
        by_hand = chapter("05", "sync_batchnorm").convert_sync_batchnorm
        on_gpu = plan.device == "cuda"
        convert = nn.SyncBatchNorm.convert_sync_batchnorm if on_gpu else by_hand
        wrapped = DistributedDataParallel(convert(model), **UNSENT)
    buckets = watch_buckets(wrapped)
    dtype = torch.bfloat16 if "bf16" in key else None
    for _ in range(2):
        train_step(wrapped, optimizer, *batch, finish=finish, dtype=dtype)
    return model, wrapped, optimizer, buckets, batch


def run(jobs: list[str], plan: Any, samples: int, replicas: int) -> list[dict[str, Any]]:
    """What each rank holds after it has trained as a stage or in a way, and its peak."""
    found = list[dict[str, Any]]()
    for job in jobs:
        trained = list[Any]()

        def train(job: str = job, trained: list = trained) -> None:
            if job in WAYS:
                trained += train_way(WAYS[job], plan, samples)
            else:
                trained += train_stage(job, plan, samples, replicas)

        peak_bytes = peak.measure(plan.device, train)
        bf16 = WAYS[job].bf16 if job in WAYS else "bf16" in job
        with torch.autocast(plan.device, torch.bfloat16, enabled=bf16):
            if job == "02":
                held = count_replicas(trained[0], trained[-1], replicas)
            else:
                held = [count(*trained)]
        found.append({"held": held, "peak_bytes": peak_bytes})
        trained.clear()
        gc.collect()  # DDP and its model hold each other
    return found


def measure(jobs: Any, plan: Any, samples: int, ranks: int = RANKS, parts: int = RANKS) -> Results:
    """Ways or stages in turn on the same ranks; samples: the local batch; parts: 02's replicas."""
    answers = start(ranks, run, list(jobs), plan, samples, parts, device=plan.device, quiet=True)
    found: Results = {}
    for job, rows in zip(jobs, zip(*answers, strict=True), strict=True):
        held = [each for row in rows for each in row["held"]]
        found[job] = {"peak_bytes": [row["peak_bytes"] for row in rows], "held": held}
    return found


def measure_process_memory(effort: Effort) -> Results:
    """The same global batch in every stage, on more and more ranks, and in each way."""
    model, size, worlds = ("net-bn", 28, (2,)) if effort.quick else ("resnet18", 64, (1, 2, 4, 8))
    momentum, adam = (peak.Plan(model, size, how, effort.device) for how in ("momentum", "adam"))
    stages, by_world = dict[str, Any](), dict[str, Any]()
    for key in list(STAGES)[:: 3 if effort.quick else 1]:
        ranks = 1 if key in ("01", "02") else RANKS
        stages |= measure([key], momentum, BATCH // ranks, ranks)
    with torch.device(effort.device):
        module, _, whole = make(momentum, BATCH)
    for world in worlds:
        ddp = measure(["04"], momentum, BATCH // world, world)["04"]
        by_world[str(world)] = {
            "DataParallel": count_replicas(module, whole, world),
            "DDP": ddp["held"],
        }
    ways = measure(list(WAYS), adam, BATCH // RANKS)
    about = {"model": model, "image_size": size, "global_batch": BATCH, "ranks": RANKS}
    about |= {"provenance": {"world_size": RANKS, "threads_a_rank": 1}, "device": effort.device}
    return {**about, "stages": stages, "worlds": by_world, "ways": ways}


def stack(
    axes: Axes, groups: Mapping[str, Sequence[Held]], texts: Any = None, styles: Any = STYLES
) -> None:
    """A stacked bar for each process of each group, in MiB; above it its height, if it is new."""
    place, middles = 0, []
    for name, many in groups.items():
        for number, held in enumerate(many):
            bottom = 0.0
            for kind, (color, hatch) in styles.items():
                look: Any = {"facecolor": color, "hatch": hatch, "edgecolor": "white"}
                axes.bar(place + number, held.get(kind, 0) / MIB, 0.9, bottom, **look)
                bottom += held.get(kind, 0) / MIB
            height = "" if held in many[:number] else f"{bottom:.{int(bottom < 10)}f}"
            text = texts[name][number] if texts else height
            axes.text(place + number, bottom, text, ha="center", va="bottom", fontsize="small")
        middles.append(place + (len(many) - 1) / 2)
        place += len(many) + 1
    axes.set_xticks(middles, list(groups))
    axes.set(ylabel="MiB held", ymargin=0.08)


def legend(axes: Axes, styles: Any = STYLES, **where: Any) -> None:
    axes.legend(handles=patches(styles)[::-1], fontsize="small", **where)


def draw_stages(axes: Axes, found: Results) -> None:
    groups = {}
    for key, stage in found["stages"].items():
        name, peaks = STAGES[key].replace(" ", "\n", 1), stage["peak_bytes"]
        if key == "02":  # its peak is the peak of all replicas together
            name, peaks = name + "\n(virtual)", [0] * len(stage["held"])
        both = zip(stage["held"], peaks, strict=True)
        groups[name] = [{**h, "at the peak": max(0, top - sum(h.values()))} for h, top in both]
    stack(axes, groups)
    axes.set_title("What a replica or rank holds: " + ABOUT.format(**found))


def draw_worlds(left: Axes, right: Axes, found: Results) -> None:
    for axes, how in ((left, "DataParallel"), (right, "DDP")):
        stack(axes, {world: each[how] for world, each in found["worlds"].items()})
    highest = max(left.get_ylim()[1], right.get_ylim()[1])
    left.set(title="DataParallel: virtual replicas", xlabel="replicas", ylim=(0, highest))
    right.set(title="DDP: real ranks, over gloo", xlabel="ranks", ylim=(0, highest))


def draw_ways(axes: Axes, found: Results) -> None:
    groups, texts, first = {}, {}, max(found["ways"]["DDP with Adam"]["peak_bytes"])
    for way, row in found["ways"].items():
        name, top = way.replace(", ", ",\n").replace(" of ", "\nof "), max(row["peak_bytes"])
        held = row["held"][0]
        groups[name] = [{**held, "at the peak": max(0, top - sum(held.values()))}]
        texts[name] = [f"{top / first - 1:+.0%}" if top != first else f"{first / MIB:.0f}"]
    stack(axes, groups, texts)
    axes.tick_params(axis="x", rotation=20)
    axes.set_title("What each way saves of a rank's peak: " + ABOUT.format(**found))
