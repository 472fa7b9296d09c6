"""What the memory of a GPU, or of a process, is spent on: every stage, every saving, foreseen.

Bytes of tensors are counted: what a process holds when the loss of a step is there, and the most
that torch's allocator gave at one time, as ledger.py of stage 01 reads it. The replicas of stage 02
are virtual: all on one device. Last: results/02_memory, what memory.py of stage 02 counts.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.record import peak_memory_bytes
from plots import BLACK, BLUE, GRAY, GREEN, ORANGE, PINK, RED, SKY, YELLOW, Axes, Figure, patches
from precision import VIEW, Batch, Training, Variant, held_bytes, watch_buckets
from step import start, train_step
from timing import Effort, Results, chapter

ledger: Any = chapter("01", "ledger")
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
COPIES: Any = {"optimizer": "adam", "ddp": UNSENT}
VIEWS, ZERO = {**COPIES, "ddp": UNSENT | VIEW}, {"optimizer": "zero adam"}
WAYS = {  # a step under DDP with Adam, and what it does to hold less
    "DDP with Adam": Variant(**COPIES),
    "bf16 autocast": Variant("bf16", **COPIES),
    "accumulate 4": Variant(accumulate=4, **COPIES),
    "views of the buckets": Variant(**VIEWS),
    "views, accumulate 4": Variant(accumulate=4, **VIEWS),
    "the same, zeroed in place": Variant(accumulate=4, in_place=True, **VIEWS),
    "ZeRO-1": Variant(**COPIES | ZERO),
    "all together": Variant("bf16", accumulate=4, in_place=True, **VIEWS | ZERO),
}

Held = dict[str, int]  # the bytes of each kind


def count(model: nn.Module, wrapped: Any, optimizer: Any, buckets: Any, batch: Batch) -> Held:
    """What this process holds after a forward and the loss; what two tensors share counts once."""
    activations, of_loss = list[Tensor](), list[Tensor]()
    with memory.saving_to(activations):
        outputs = wrapped(batch[0])
    with memory.saving_to(of_loss):
        loss = nn.functional.cross_entropy(outputs, batch[1])
    fixed = [*model.parameters(), *model.buffers(), *batch]
    held = held_bytes(model, optimizer, buckets)
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


def train_way(way: Variant, plan: Any, samples: int) -> tuple:
    model, _, (images, labels) = make(plan, samples)
    one = Training(way, model, images.device, watched=True)
    # After its first backward DDP lays out its buckets again, and holds both layouts for a moment.
    one.model.eval()(images[:1]).sum().backward()
    time.sleep(0.05)  # gloo's thread lets go of the old layout, else it frees it later, unseen
    model.zero_grad()
    one.model.train()
    for _ in range(2):  # the first leaves behind what the second finds
        one(images, labels)
    micro_batch = images.chunk(way.accumulate)[0], labels.chunk(way.accumulate)[0]
    return model, one.model, one.optimizer, one.buckets, micro_batch


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
    """What each rank holds after it has trained as a stage or in ways; its peak, all it takes."""
    found, cpu = list[dict[str, Any]](), torch.device("cpu")
    for job in jobs:
        before, made, way = peak_memory_bytes(cpu), list[Any](), WAYS.get(job)

        def train(job: str = job, made: list = made, way: Variant | None = way) -> None:
            how = (way, plan, samples) if way else (job, plan, samples, replicas)
            made += train_way(*how) if way else train_stage(*how)

        peak_bytes = ledger.measure(plan.device, train)
        resident = [before, peak_memory_bytes(cpu)]
        bf16 = "bf16" in (way.precision if way else job)
        with torch.autocast(plan.device, torch.bfloat16, enabled=bf16):
            held = count_replicas(made[0], made[-1], replicas) if job == "02" else [count(*made)]
        found.append({"held": held, "peak_bytes": peak_bytes, "resident_bytes": resident})
        made.clear()
        gc.collect()  # DDP and its model hold each other
    return found


def measure(jobs: Any, plan: Any, samples: int, ranks: int = RANKS, parts: int = RANKS) -> Results:
    """Ways or stages in turn on the same ranks; samples: the local batch; parts: 02's replicas."""
    answers = start(ranks, run, list(jobs), plan, samples, parts, device=plan.device, quiet=True)
    found: Results = {}
    for job, rows in zip(jobs, zip(*answers, strict=True), strict=True):
        found[job] = {key: [row[key] for row in rows] for key in ("peak_bytes", "resident_bytes")}
        found[job]["held"] = [held for row in rows for held in row["held"]]
        if job in WAYS:
            found[job]["predicted_bytes"] = predict(WAYS[job], plan, samples, ranks)
    return found


def predict(way: Variant, plan: Any, samples: int, ranks: int) -> int:
    """The peak of a rank, foreseen without a rank: stage 01's rehearsal, and what DDP changes."""
    parts, micro = peak.parts_of(plan), samples // way.accumulate
    total = peak.rehearse(plan, micro, way.accumulate)[0]
    total += (samples - micro) * 4 * plan.channels * plan.image_size**2  # images that wait
    if "gradient_as_bucket_view" not in way.ddp or (way.accumulate > 1 and not way.in_place):
        total += parts["gradients"]  # in the buckets: once more
    elif way.accumulate == 1:  # each is made apart, then copied to its bucket
        with torch.device("meta"):
            total += max(parameter.nbytes for parameter in plan.build()[0].parameters())
    if way.optimizer == "zero adam":
        total -= round(parts["optimizer state"] * (1 - 1 / ranks))
    if way.precision == "bf16":
        total += saved_bytes(plan, micro, True) - saved_bytes(plan, micro, False)
    return total


def saved_bytes(plan: Any, samples: int, bf16: bool) -> int:
    """Bytes that autograd saves of a batch, from two tiny ones: no meta device knows autocast."""
    found = []
    with torch.device(plan.device), torch.autocast(plan.device, torch.bfloat16, enabled=bf16):
        model, _ = plan.build()
        for few in (2, 3):
            with memory.saving_to(kept := list[Tensor]()):
                plan.loss(model, few)
            found.append(memory.size(kept, [*model.parameters(), *model.buffers()]))
    return found[0] + (samples - 2) * (found[1] - found[0])


def compare(row: dict[str, Any]) -> dict[str, float]:
    predicted, measured = row["predicted_bytes"], max(row["peak_bytes"])
    percent = round(100 * (predicted / measured - 1), 2)
    return {"predicted_bytes": predicted, "measured_bytes": measured, "percent_off": percent}


def measure_process_memory(effort: Effort) -> Results:
    """The same global batch in every stage, on more and more ranks, and in each way."""
    model, size, worlds = ("net-bn", 28, (1, 2)) if effort.quick else ("resnet18", 64, (1, 2, 4, 8))
    momentum, adam = (peak.Plan(model, size, how, effort.device) for how in ("momentum", "adam"))
    stages, found, foreseen = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key in STAGES:
        ranks = 1 if key in ("01", "02") else RANKS
        stages |= measure([key], momentum, BATCH // ranks, ranks)
        if key in ("01", "03"):
            predicted = peak.rehearse(momentum, BATCH // ranks)[0]
            foreseen[STAGES[key]] = {**stages[key], "predicted_bytes": predicted}
    with torch.device(effort.device):
        module, _, whole = make(momentum, BATCH)
    for world in worlds:
        ddp = measure(["04"], momentum, BATCH // world, world)["04"]
        predicted = predict(Variant(), momentum, BATCH // world, world)
        row = {"DDP": ddp["held"], "peak_bytes": ddp["peak_bytes"], "predicted_bytes": predicted}
        found[str(world)] = {"DataParallel": count_replicas(module, whole, world), **row}
        foreseen[f"04 DDP, {world} rank{'s' * (world > 1)}"] = row
    ways = measure(list(WAYS), adam, BATCH // RANKS)
    off = {name: compare(row) for name, row in (foreseen | ways).items()}
    about = {"model": model, "image_size": size, "global_batch": BATCH, "ranks": RANKS}
    about |= {"provenance": {"world_size": RANKS, "threads_a_rank": 1}, "device": effort.device}
    return {**about, "stages": stages, "worlds": found, "ways": ways, "foreseen": off}


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


def measure_replica_memory(effort: Effort) -> Results:
    """What memory.py of stage 02 counts: bytes, which do not depend on the machine."""
    return {"batch": memory.BATCH, "bytes": memory.count_all()}


def draw_replica_memory(results: Results) -> Figure:
    styles = {kind: (STYLES.get(kind, (RED,))[0], "") for kind in memory.KINDS}
    styles["loss"] = (PINK, "")
    figure, panels = plt.subplots(1, 3, figsize=(13, 5), layout="constrained")
    names = ["0\nmain device", *map(str, range(1, memory.REPLICAS))]
    for panel, (model, both) in zip(panels, results["bytes"].items(), strict=True):
        groups = dict(zip(names, zip(*both.values(), strict=True), strict=True))
        stack(panel, groups, dict.fromkeys(names, ("out", "in")), styles)
        panel.set(title=model, xlabel="replica")
    figure.legend(handles=patches(styles)[::-1], loc="outside right center")
    figure.suptitle(
        f"What {memory.REPLICAS} replicas hold of a batch of {memory.BATCH} before backward;"
        " the loss outside forward (out) or inside (in)"
    )
    return figure
