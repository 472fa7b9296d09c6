"""What the memory of a GPU, or of a process, is spent on: in every stage, and with every saving.

Bytes of tensors are counted: what a process holds when the loss of a step is there, and the most
that torch's allocator gave at one time, as peak.py of stage 01 reads it. The replicas of stage 02
are virtual: all on one device.
"""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from plots import BLACK, BLUE, GRAY, GREEN, ORANGE, RED, SKY, YELLOW
from ranks import run_ranks
from timing import Effort, Results, load_chapter
from training_step import train_step

memory: Any = load_chapter("02", "memory")
peak: Any = load_chapter("01", "peak")
DataParallel: Any = load_chapter("02", "from_scratch").DataParallel

RANKS, GLOBAL_BATCH = 2, 64
COPIES = {  # colors and hatches of what does not grow with the batch
    "parameters": (BLUE, ""),
    "buffers": (BLACK, ""),
    "gradients": (SKY, "//"),
    "buckets": (ORANGE, "\\\\"),
    "optimizer": (GRAY, ".."),
}
HELD = {
    **COPIES,
    "batch": (YELLOW, ""),
    "activations": (GREEN, "xx"),
    "outputs and loss": (RED, ""),
}

BytesOf = dict[str, int]  # of each kind


def unwrapped(model: nn.Module, replicas: int) -> nn.Module:
    return model


def data_parallel(model: nn.Module, replicas: int) -> nn.Module:
    device = next(model.parameters()).device
    return DataParallel(model, [device] * replicas)


def ddp_without_init_sync(model: nn.Module, replicas: int, **options: Any) -> nn.Module:
    """Without the broadcast of the weights: gloo frees its buffer, as large as they are, unseen."""
    options["init_sync"] = False
    return DistributedDataParallel(model, **options)


def ddp_with_sync_batchnorm(model: nn.Module, replicas: int) -> nn.Module:
    convert = load_chapter("05", "sync_batchnorm").convert_sync_batchnorm
    if next(model.parameters()).is_cuda:
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
    return ddp_without_init_sync(convert(model), replicas)


@dataclass(frozen=True)
class MemoryJob:
    """What is trained for two steps and then counted: a stage, or DDP and what makes it hold less.

    wrap: called with the model and the number of replicas.
    """

    label: str = ""
    wrap: Callable[[nn.Module, int], nn.Module] = ddp_without_init_sync
    reducer: Callable[[nn.Module], Any] | None = None  # of stage 03
    bf16: bool = False
    micro_batches: int = 1
    zeroed_in_place: bool = False  # zero_grad(set_to_none=False)
    zero_1: bool = False  # each rank keeps the optimizer's state of its share: ZeRO's first stage


ddp_with_views: Any = partial(ddp_without_init_sync, gradient_as_bucket_view=True)
PerParameter = load_chapter("03", "reducers/reducers").PerParameter
STAGES = {
    "01": MemoryJob("01 one process", unwrapped),
    "02": MemoryJob("02 DataParallel", data_parallel),
    "03": MemoryJob("03 by hand", unwrapped, PerParameter),
    "04": MemoryJob("04 DDP"),
    "05": MemoryJob("05 DDP, SyncBN", ddp_with_sync_batchnorm),
    "05 bf16": MemoryJob("05 in bf16", ddp_with_sync_batchnorm, bf16=True),
}
WAYS = {
    "DDP with Adam": MemoryJob(),
    "bf16 autocast": MemoryJob(bf16=True),
    "accumulate 4": MemoryJob(micro_batches=4),
    "views of the buckets": MemoryJob(wrap=ddp_with_views),
    "views, accumulate 4": MemoryJob(wrap=ddp_with_views, micro_batches=4),
    "the same, zeroed in place": MemoryJob(
        wrap=ddp_with_views, micro_batches=4, zeroed_in_place=True
    ),
    "ZeRO-1": MemoryJob(zero_1=True),
    "all together": MemoryJob(
        wrap=ddp_with_views, bf16=True, micro_batches=4, zeroed_in_place=True, zero_1=True
    ),
}
JOBS = {**STAGES, **WAYS}


@dataclass
class Trained:
    """What a job leaves behind. buckets: of DDP, where each begins, and its bytes."""

    model: nn.Module
    wrapped: Any
    optimizer: Any
    buckets: dict[int, int]
    images: Tensor
    labels: Tensor


def watch_buckets(wrapped: nn.Module) -> dict[int, int]:
    """From now on: where each bucket of DDP begins, and its bytes."""
    buckets: dict[int, int] = {}

    def note(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # of the previous step: the layout may change
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(group, bucket)

    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(None, note)
    return buckets


def train(job: MemoryJob, plan: Any, samples: int, replicas: int) -> Trained:
    """Two steps; the second finds what the first has left behind."""
    torch.manual_seed(0)
    images = torch.randn(samples, plan.channels, plan.image_size, plan.image_size)
    labels = torch.arange(samples) % plan.classes
    model, optimizer = plan.build()
    wrapped = job.wrap(model, replicas)
    buckets = watch_buckets(wrapped)
    if job.zero_1:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)
    finish = job.reducer(model).finish if job.reducer else lambda: None
    if isinstance(wrapped, DistributedDataParallel):
        # After its first backward it lays out its buckets again, and holds both for a moment.
        wrapped.eval()(images[:1]).sum().backward()
        time.sleep(0.05)  # gloo's thread lets go of the old layout, else it frees it later, unseen
        model.zero_grad()
        wrapped.train()
    images, labels = (tensor.chunk(job.micro_batches)[0] for tensor in (images, labels))
    step = partial(
        train_step,
        micro_batches=job.micro_batches,
        dtype=torch.bfloat16 if job.bf16 else None,
        zeroed_in_place=job.zeroed_in_place,
    )
    for _ in range(2):
        step(wrapped, optimizer, images, labels, finish)
    return Trained(model, wrapped, optimizer, buckets, images, labels)


def count(trained: Trained) -> BytesOf:
    """What this process holds after a forward and the loss; what two tensors share counts once."""
    model, batch = trained.model, (trained.images, trained.labels)
    activations, loss_tensors = list[Tensor](), list[Tensor]()
    with memory.saving_to(activations):
        outputs = trained.wrapped(trained.images)
    with memory.saving_to(loss_tensors):
        loss = nn.functional.cross_entropy(outputs, trained.labels)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # A gradient that is a view of a bucket counts as bucket.
    apart = [g for g in gradients if g.untyped_storage().data_ptr() not in trained.buckets]
    optimizer = getattr(trained.optimizer, "optim", trained.optimizer)  # ZeRO: of its share
    state = [value for each in optimizer.state.values() for value in each.values()]
    fixed = [*model.parameters(), *model.buffers(), *batch]
    return {
        "parameters": memory.size(model.parameters()),
        "buffers": memory.size(model.buffers()),
        "gradients": memory.size(apart),
        "buckets": sum(trained.buckets.values()),
        "optimizer": memory.size(value for value in state if isinstance(value, Tensor)),
        "batch": memory.size(batch),
        "activations": memory.size(activations, fixed),
        "outputs and loss": memory.size([outputs, loss, *loss_tensors], [*fixed, *activations]),
    }


def count_replicas(trained: Trained, replicas: int) -> list[BytesOf]:
    """What each virtual replica of DataParallel holds, by stage 02's own count."""
    example = trained.model, trained.images, trained.labels
    buffers = memory.size(trained.model.buffers())
    rows = memory.held_by_replica(example, replicas, inside=False)
    for row in rows:
        row["outputs and loss"] = row.pop("outputs") + row.pop("loss")
        row["parameters"] -= buffers
        row |= {"buffers": buffers, "buckets": 0}
    return rows


def train_and_count(names: list[str], plan: Any, samples: int, replicas: int) -> list[Results]:
    """Of each job on this rank: what is held, by process or replica, and the peak."""
    rows = list[Results]()
    for job in map(JOBS.__getitem__, names):
        results = list[Trained]()

        def run(job: MemoryJob = job, results: list[Trained] = results) -> None:
            results.append(train(job, plan, samples, replicas))

        peak_bytes = peak.peak_of(plan.device, run)
        trained = results.pop()
        with torch.autocast(plan.device, torch.bfloat16, enabled=job.bf16):
            virtual = isinstance(trained.wrapped, DataParallel)
            held = count_replicas(trained, replicas) if virtual else [count(trained)]
        rows.append({"held": held, "peak_bytes": peak_bytes})
        del trained
        gc.collect()  # DDP and its model hold each other
    return rows


def measure(
    names: Iterable[str], plan: Any, samples: int, ranks: int = RANKS, replicas: int = RANKS
) -> Results:
    """Jobs in turn on the same ranks; samples: the local batch; replicas: of stage 02."""
    names, results = list(names), Results()
    rows_of_ranks = run_ranks(
        ranks, train_and_count, names, plan, samples, replicas, device=plan.device, quiet=True
    )
    for name, rows in zip(names, zip(*rows_of_ranks, strict=True), strict=True):
        held = [bytes_of for row in rows for bytes_of in row["held"]]
        results[name] = {"peak_bytes": [row["peak_bytes"] for row in rows], "held": held}
    return results


def measure_process_memory(effort: Effort) -> Results:
    """The same global batch in every stage and in each way."""
    model, size = ("net-bn", 28) if effort.quick else ("resnet18", 64)
    momentum, adam = (
        peak.Plan(model, size, optimizer, effort.device) for optimizer in ("momentum", "adam")
    )
    stages = dict[str, Any]()
    for key in list(STAGES)[:: 3 if effort.quick else 1]:
        ranks = 1 if key in ("01", "02") else RANKS
        stages |= measure([key], momentum, GLOBAL_BATCH // ranks, ranks)
    ways = measure(WAYS, adam, GLOBAL_BATCH // RANKS)
    about = {"model": model, "image_size": size, "global_batch": GLOBAL_BATCH, "ranks": RANKS}
    about |= {"provenance": {"world_size": RANKS, "threads_a_rank": 1}, "device": effort.device}
    return {**about, "stages": stages, "ways": ways}
