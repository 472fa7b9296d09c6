"""What is the memory of a GPU, or of a process, spent on? In every stage, and with every saving.

Bytes of tensors are counted: what a process holds when the loss of a step is there, and the most
that torch's allocator gave at one time, as peak.py of stage 01 reads it. The replicas of stage 02
are virtual, all on one device, and stage 02 itself counts what they hold.
"""

import gc
import time
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

import memory as stage_02_memory
import peak
import reducers
from benchmarks.measure.sections import section
from benchmarks.measure.timing import Effort
from benchmarks.measure.training_step import TrainingStep, with_sync_batchnorm
from benchmarks.result_files import Results
from benchmarks.variants import VARIANTS
from local_ranks.ranks import run_ranks

RANKS, GLOBAL_BATCH = 2, 64
BytesOf = dict[str, int]  # by kind of tensor


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    """Wrap in DDP without its broadcast of the weights, whose buffer gloo frees unseen."""
    return DistributedDataParallel(model, init_sync=False, **options)


def zero_1(model: nn.Module) -> Optimizer:
    """Each rank keeps the optimizer's state of its share, as in ZeRO's first stage."""
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)


PLAIN: dict[str, Any] = {"wrap": ddp}
VIEWS = {"wrap": partial(ddp, gradient_as_bucket_view=True)}
SYNC_BATCHNORM = {"wrap": lambda model: ddp(with_sync_batchnorm(model))}
BF16, ACCUMULATE = {"dtype": torch.bfloat16}, {"micro_batches": 4}
IN_PLACE = {**ACCUMULATE, "zeroed_in_place": True}
STEP_OPTIONS: dict[str, dict[str, Any]] = {  # options of the step, by stage
    "01": {},
    "02": {},
    "03": {"reducer": reducers.PerParameter},
    "04": PLAIN,
    "05": SYNC_BATCHNORM,
    "05-bf16": {**SYNC_BATCHNORM, **BF16},
}
WAYS = {  # ways to hold less than DDP with Adam
    "DDP with Adam": PLAIN,
    "bf16 autocast": {**PLAIN, **BF16},
    "accumulate 4": {**PLAIN, **ACCUMULATE},
    "views of the buckets": VIEWS,
    "views, accumulate 4": {**VIEWS, **ACCUMULATE},
    "the same, zeroed in place": {**VIEWS, **IN_PLACE},
    "ZeRO-1": {**PLAIN, "optimizer": zero_1},
    "all together": {**VIEWS, **IN_PLACE, **BF16, "optimizer": zero_1},
}


def random_images(plan: Any, samples: int) -> Tensor:
    return torch.randn(samples, plan.channels, plan.image_size, plan.image_size)


class CountedStep(TrainingStep):
    """Takes two steps on this rank, and then counts what the rank holds."""

    def __init__(self, plan: Any, samples: int, micro_batches: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        images = random_images(plan, samples).chunk(micro_batches)[0]
        model, optimizer = plan.build()
        options = {"optimizer": lambda model: optimizer, **options}
        super().__init__(
            model, images, micro_batches=micro_batches, classes=plan.classes, **options
        )
        self.buckets: dict[int, int] = {}  # DDP's: where each begins, and its bytes
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.register_comm_hook(None, self.note_bucket)
            # After its first backward it lays out its buckets again, and holds both for a moment.
            self.wrapped.eval()(images[:1]).sum().backward()
            time.sleep(0.05)  # gloo's thread lets go of the old layout, else it does so later
            model.zero_grad()
            self.wrapped.train()
        for _ in range(2):  # the second step finds what the first has left behind
            self()

    def note_bucket(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self.buckets.clear()  # the layout of the previous step may have changed
        storage = bucket.buffer().untyped_storage()
        self.buckets[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(group, bucket)

    def held(self) -> BytesOf:
        """Count bytes by kind after a forward and the loss; what two tensors share counts once."""
        model, batch = self.model, (self.images, self.labels)
        activations, loss_tensors = list[Tensor](), list[Tensor]()
        with self.autocast():
            with stage_02_memory.saving_to(activations):
                outputs = self.wrapped(self.images)
            with stage_02_memory.saving_to(loss_tensors):
                loss = nn.functional.cross_entropy(outputs, self.labels)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # A gradient that is a view of a bucket counts as bucket.
        apart = [g for g in gradients if g.untyped_storage().data_ptr() not in self.buckets]
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # ZeRO wraps it
        state = [value for each in optimizer.state.values() for value in each.values()]
        fixed = [*model.parameters(), *model.buffers(), *batch]
        return {
            "parameters": stage_02_memory.size(model.parameters()),
            "buffers": stage_02_memory.size(model.buffers()),
            "gradients": stage_02_memory.size(apart),
            "buckets": sum(self.buckets.values()),
            "optimizer": stage_02_memory.size(
                value for value in state if isinstance(value, Tensor)
            ),
            "batch": stage_02_memory.size(batch),
            "activations": stage_02_memory.size(activations, fixed),
            "outputs and loss": stage_02_memory.size(
                [outputs, loss, *loss_tensors], [*fixed, *activations]
            ),
        }


def count_replicas(rank: int, plan: Any, samples: int, replicas: int) -> list[BytesOf]:
    """Count what each virtual replica of stage 02 holds."""
    torch.manual_seed(0)
    images, (model, _) = random_images(plan, samples), plan.build()
    labels = torch.arange(samples, device=images.device) % plan.classes
    rows = stage_02_memory.held_by_replica((model, images, labels), replicas, inside=False)
    buffers = stage_02_memory.size(model.buffers())
    for row in rows:
        row["outputs and loss"] = row.pop("outputs") + row.pop("loss")
        row["parameters"] -= buffers
        row |= {"buffers": buffers, "buckets": 0}
    return rows


def train_and_count(rank: int, names: list[str], plan: Any, samples: int) -> list[Results]:
    """Count what this rank holds in each stage or way, and its peak in bytes."""
    rows, steps = list[Results](), list[CountedStep]()
    for name in names:
        options = WAYS[name] if name in WAYS else STEP_OPTIONS[name]

        def count(options: dict[str, Any] = options) -> None:
            steps.append(CountedStep(plan, samples, **options))

        peak_bytes = peak.peak_of(plan.device, count)
        rows.append({"peak_bytes": peak_bytes, "held": steps.pop().held()})
        gc.collect()  # DDP and its model hold each other
    return rows


def measure(names: Iterable[str], plan: Any, samples: int, ranks: int = RANKS) -> Results:
    """Count stages and ways one after another on the same ranks; samples: the local batch."""
    names = list(names)
    rows_of_ranks = run_ranks(
        ranks, train_and_count, names, plan, samples, device=plan.device, quiet=True
    )
    rows_of_jobs = zip(*rows_of_ranks, strict=True)
    return {
        name: {key: [row[key] for row in rows] for key in ("peak_bytes", "held")}
        for name, rows in zip(names, rows_of_jobs, strict=True)
    }


def count_in_stages(keys: Collection[str], plan: Any, global_batch: int, ranks: int) -> Results:
    """Count each stage as it runs: 01 in one process, 02 in one with so many replicas."""
    results, others = Results(), [key for key in keys if key not in ("01", "02")]
    if "01" in keys:
        results |= measure(["01"], plan, global_batch, ranks=1)
    if "02" in keys:
        [held] = run_ranks(1, count_replicas, plan, global_batch, ranks, device=plan.device)
        results["02"] = {"held": held}
    if others:
        results |= measure(others, plan, global_batch // ranks, ranks)
    return {key: {"label": VARIANTS[key].label, **row} for key, row in results.items()}


@section("process_memory", seconds_on_gpu=75)
def measure_process_memory(effort: Effort) -> Results:
    """Count what a process holds with the same global batch in every stage and in each way."""
    model, size = ("net-bn", 28) if effort.quick else ("resnet18", 64)
    momentum = peak.Plan(model, size, "momentum", effort.device)
    adam = peak.Plan(model, size, "adam", effort.device)
    return {
        "model": model,
        "image_size": size,
        "global_batch": GLOBAL_BATCH,
        "ranks": RANKS,
        "device": effort.device,
        "stages": count_in_stages(STEP_OPTIONS, momentum, GLOBAL_BATCH, RANKS),
        "ways": measure(WAYS, adam, GLOBAL_BATCH // RANKS),
    }
