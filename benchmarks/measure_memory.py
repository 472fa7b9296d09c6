"""What the memory of a GPU, or of a process, is spent on: in every stage, and with every saving.

Bytes of tensors are counted: what a process holds when the loss of a step is there, and the most
that torch's allocator gave at one time, as peak.py of stage 01 reads it. The replicas of stage 02
are virtual: all on one device.
"""

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
from training_step import Trainer, unwrapped, with_sync_batchnorm

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


def data_parallel(model: nn.Module, replicas: int) -> nn.Module:
    """Virtual replicas: all of them on one device."""
    return DataParallel(model, [next(model.parameters()).device] * replicas)


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    """Without the broadcast of the weights: gloo frees its buffer, as large as they are, unseen."""
    return DistributedDataParallel(model, init_sync=False, **options)


def ddp_with_sync_batchnorm(model: nn.Module) -> nn.Module:
    return ddp(with_sync_batchnorm(model))


@dataclass(frozen=True)
class MemoryJob:
    """What is trained for two steps and then counted: a stage, or DDP and what makes it hold less.

    options: of Trainer. zero_1: each rank keeps the optimizer's state of its share, as in ZeRO's
    first stage.
    """

    label: str = ""
    wrap: Callable[..., nn.Module] = ddp
    options: Mapping[str, Any] = field(default_factory=dict)
    zero_1: bool = False


ddp_with_views = partial(ddp, gradient_as_bucket_view=True)
BF16, ACCUMULATE = {"dtype": torch.bfloat16}, {"micro_batches": 4}
IN_PLACE = {**ACCUMULATE, "zeroed_in_place": True}
by_hand = {"reducer": load_chapter("03", "reducers/reducers").PerParameter}
STAGES = {
    "01": MemoryJob("01 one process", unwrapped),
    "02": MemoryJob("02 DataParallel", data_parallel),
    "03": MemoryJob("03 by hand", unwrapped, by_hand),
    "04": MemoryJob("04 DDP"),
    "05": MemoryJob("05 DDP, SyncBN", ddp_with_sync_batchnorm),
    "05 bf16": MemoryJob("05 in bf16", ddp_with_sync_batchnorm, BF16),
}
WAYS = {
    "DDP with Adam": MemoryJob(),
    "bf16 autocast": MemoryJob(options=BF16),
    "accumulate 4": MemoryJob(options=ACCUMULATE),
    "views of the buckets": MemoryJob(wrap=ddp_with_views),
    "views, accumulate 4": MemoryJob(wrap=ddp_with_views, options=ACCUMULATE),
    "the same, zeroed in place": MemoryJob(wrap=ddp_with_views, options=IN_PLACE),
    "ZeRO-1": MemoryJob(zero_1=True),
    "all together": MemoryJob(wrap=ddp_with_views, options={**IN_PLACE, **BF16}, zero_1=True),
}
JOBS = {**STAGES, **WAYS}


class Training:
    """A job on this rank: `train` it, and then `count` what it holds."""

    def __init__(self, job: MemoryJob, plan: Any, samples: int, replicas: int) -> None:
        self.job, self.plan, self.samples, self.replicas = job, plan, samples, replicas
        self.buckets: dict[int, int] = {}  # of DDP: where each begins, and its bytes

    def train(self) -> None:
        """Two steps; the second finds what the first has left behind."""
        torch.manual_seed(0)
        plan, job = self.plan, self.job
        images = torch.randn(self.samples, plan.channels, plan.image_size, plan.image_size)
        images = images.chunk(job.options.get("micro_batches", 1))[0]
        model, optimizer = plan.build()
        wrap = partial(job.wrap, replicas=self.replicas) if job.wrap is data_parallel else job.wrap
        if job.zero_1:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)
        self.trainer = Trainer(
            model, images, wrap, optimizer=optimizer, classes=plan.classes, **job.options
        )
        if isinstance(self.trainer.wrapped, DistributedDataParallel):
            self.trainer.wrapped.register_comm_hook(None, self.note_bucket)
            # After its first backward it lays out its buckets again, and holds both for a moment.
            self.trainer.wrapped.eval()(images[:1]).sum().backward()
            time.sleep(0.05)  # gloo's thread lets go of the old layout, else it does so later
            model.zero_grad()
            self.trainer.wrapped.train()
        for _ in range(2):
            self.trainer()

    def note_bucket(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self.buckets.clear()  # of the previous step: the layout may change
        storage = bucket.buffer().untyped_storage()
        self.buckets[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(group, bucket)

    def count(self) -> list[BytesOf]:
        """Of this process, or of each virtual replica of DataParallel."""
        with self.trainer.autocast():
            if self.job.wrap is data_parallel:
                return self.count_replicas()
            return [self.count_process()]

    def count_process(self) -> BytesOf:
        """After a forward and the loss; what two tensors share counts once."""
        model, batch = self.trainer.model, (self.trainer.images, self.trainer.labels)
        activations, loss_tensors = list[Tensor](), list[Tensor]()
        with memory.saving_to(activations):
            outputs = self.trainer.wrapped(self.trainer.images)
        with memory.saving_to(loss_tensors):
            loss = nn.functional.cross_entropy(outputs, self.trainer.labels)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # A gradient that is a view of a bucket counts as bucket.
        apart = [g for g in gradients if g.untyped_storage().data_ptr() not in self.buckets]
        optimizer = getattr(self.trainer.optimizer, "optim", self.trainer.optimizer)  # of ZeRO
        state = [value for each in optimizer.state.values() for value in each.values()]
        fixed = [*model.parameters(), *model.buffers(), *batch]
        return {
            "parameters": memory.size(model.parameters()),
            "buffers": memory.size(model.buffers()),
            "gradients": memory.size(apart),
            "buckets": sum(self.buckets.values()),
            "optimizer": memory.size(value for value in state if isinstance(value, Tensor)),
            "batch": memory.size(batch),
            "activations": memory.size(activations, fixed),
            "outputs and loss": memory.size([outputs, loss, *loss_tensors], [*fixed, *activations]),
        }

    def count_replicas(self) -> list[BytesOf]:
        """By stage 02's own count."""
        example = self.trainer.model, self.trainer.images, self.trainer.labels
        buffers = memory.size(self.trainer.model.buffers())
        rows = memory.held_by_replica(example, self.replicas, inside=False)
        for row in rows:
            row["outputs and loss"] = row.pop("outputs") + row.pop("loss")
            row["parameters"] -= buffers
            row |= {"buffers": buffers, "buckets": 0}
        return rows


def train_and_count(names: list[str], plan: Any, samples: int, replicas: int) -> list[Results]:
    """Of each job on this rank: what is held, by process or replica, and the peak."""
    rows = list[Results]()
    for name in names:
        training = Training(JOBS[name], plan, samples, replicas)
        peak_bytes = peak.peak_of(plan.device, training.train)
        rows.append({"held": training.count(), "peak_bytes": peak_bytes})
        del training
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
