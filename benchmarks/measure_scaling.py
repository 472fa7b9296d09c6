"""The time of a DDP step on this machine, predicted before it is measured: for notebook 04.

What the model in beyond/forecast/step_model.py needs is measured apart from DDP, in the same
rounds: steps without DDP, and convolutions with an all-reduce behind or beside them.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.chapters import load_chapter
from common.ranks import run_ranks
from timing import Results, Times, interleave, summarize
from training_step import Trainer, build, ddp_without_buffers, train_copy

step_model = load_chapter("beyond", "forecast/step_model")
fill_buckets = load_chapter("beyond", "forecast/gradient_order").fill_buckets

# What is timed beside the steps of DDP. One all-reduce runs behind some work, and one beside more.
WITHOUT_DDP, DDP = "alone", "DDP"
WORK, LONG_WORK, BESIDE_WORK, COPY = "work", "long", "beside", "copy"
LONG, BYTES_BESIDE, BYTES_COPIED = 8, 2**23, 2**24  # LONG: times the work
SIZES = [2**14, 2**20, 2**22, BYTES_BESIDE, 2**24, 25 * 2**20]  # bytes of the one behind the work
SMALL_SIZES = [2**10, 2**17, 2**20, BYTES_BESIDE]  # for net: its bucket has 87,360


def predict_on_ranks(world_size: int, model: str, rounds: int) -> Results:
    """A step of DDP, predicted from what is not DDP, beside its measurement.

    The error is the median of the rounds': a slow minute slows both times.
    """
    first, *_ = run_ranks(world_size, time_and_predict, model, rounds)
    return first


class StepWithoutDDP(Trainer):
    """A step that notes when forward, backward, the optimizer and each gradient are done."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        super().__init__(copy.deepcopy(model), images)
        self.ready: dict[Tensor, float] = {}
        self.steps: list[list[float]] = []
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.note_gradient)

    def note_gradient(self, parameter: Tensor) -> None:
        self.ready[parameter] = time.perf_counter()

    def __call__(self) -> None:
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        self.optimizer.zero_grad()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        gradients = [self.ready[parameter] for parameter in self.model.parameters()]
        ends = forward, backward, time.perf_counter(), *gradients
        self.steps.append([end - begin for end in ends])

    def shares(self) -> tuple[float, float, list[float]]:
        """Forward's and backward's share of a step, and of backward until each gradient is ready.

        The medians of the steps, and of these the mean of the ranks.
        """
        forward, backward, end, *gradients = np.array(self.steps).T
        shares = [forward / end, (backward - forward) / end]
        shares += [(gradient - forward) / (backward - forward) for gradient in gradients]
        medians = torch.from_numpy(np.median(shares, axis=1))
        dist.all_reduce(medians)
        forward_share, backward_share, *ready = (medians / dist.get_world_size()).tolist()
        return forward_share, backward_share, ready


def behind_work(size: int) -> str:
    return f"work, then {size}"


def work_steps(sizes: list[int]) -> dict[str, Callable]:
    """Work; work, then an all-reduce of each size; long work, one all-reduce beside it; a copy."""
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).requires_grad_(False)
    images, tensors = torch.randn(4, 64, 32, 32), {size: torch.zeros(size // 4) for size in sizes}
    gradient, bucket = torch.zeros(2, BYTES_COPIED // 4)

    def work(times: int = 1) -> None:
        for _ in range(times):
            layer(images)

    def then_reduce(size: int) -> None:
        work()
        dist.all_reduce(tensors[size])

    def reduce_meanwhile() -> None:
        under_way = dist.all_reduce(tensors[BYTES_BESIDE], async_op=True)
        work(LONG)
        under_way.wait()

    def there_and_back() -> None:  # into a bucket, divided, and out of it
        torch.mul(gradient, 0.5, out=bucket)
        gradient.copy_(bucket)

    steps: dict[str, Callable] = {WORK: work, COPY: there_and_back, LONG_WORK: partial(work, LONG)}
    steps |= {behind_work(size): partial(then_reduce, size) for size in sizes}
    return steps | {BESIDE_WORK: reduce_meanwhile}


def extra_seconds(times: Times, name: str, without: str) -> float:
    """The seconds that this takes more than that: the median of the rounds."""
    return float(np.median(np.subtract(times[name], times[without])))


def all_reduce_seconds(times: Times, size: int) -> float:
    """As in a step, ranks come to it from computing."""
    return max(extra_seconds(times, behind_work(size), WORK), 1e-6)


def fit(world_size: int, times: Times, sizes: list[int]) -> Any:
    """The link on which a ring takes the measured times, with the least relative error."""
    if world_size == 1:
        return step_model.Link(0.0, 1e15)
    messages = 2 * (world_size - 1)
    seconds = np.array([all_reduce_seconds(times, size) for size in sizes])
    matrix = np.array([(messages, messages / world_size * size) for size in sizes])
    # What is smaller than the scatter of the work before it must not count as if it were exact.
    weights = 1 / np.maximum(seconds, 0.1 * median(times[WORK]))
    alpha, per_byte = np.linalg.lstsq(matrix * weights[:, None], seconds * weights, rcond=None)[0]
    return step_model.Link(max(float(alpha), 0.0), 1 / max(float(per_byte), 1e-15))


def jobs_of(without_ddp: StepWithoutDDP, times: Times) -> list[Any]:
    """The computing of a step in each round, with the copies in and out of the buckets."""
    forward, backward, ready = without_ddp.shares()
    sizes = [parameter.nbytes for parameter in without_ddp.model.parameters()]
    buckets = fill_buckets(sorted(zip(sizes, ready, strict=True), key=lambda each: each[1]))
    # Backward fills the buckets; in the end they are emptied.
    one_way = median(times[COPY]) / BYTES_COPIED * sum(sizes) / 2
    return [
        step_model.Job(
            forward * seconds,
            backward * seconds + one_way,
            (1 - forward - backward) * seconds + one_way,
            buckets,
        )
        for seconds in times[WITHOUT_DDP]
    ]


def time_and_predict(rank: int, name: str, rounds: int) -> Results:
    model, images = build(name)
    without_ddp, sizes = StepWithoutDDP(model, images), SMALL_SIZES if name == "net" else SIZES
    steps: dict[str, Callable] = {WITHOUT_DDP: without_ddp, **work_steps(sizes)}
    steps[DDP] = train_copy(model, images, wrap=ddp_without_buffers)
    times = interleave(steps, rounds)
    summary, jobs = summarize(times), jobs_of(without_ddp, times)
    world_size = dist.get_world_size()
    link = fit(world_size, times, sizes)
    # What a second of communication takes from the computing beside it.
    overlap_cost = extra_seconds(times, BESIDE_WORK, LONG_WORK)
    slowdown = min(1.0, max(0.0, overlap_cost / all_reduce_seconds(times, BYTES_BESIDE)))
    cost = partial(step_model.ring, world_size=world_size, link=link)
    predicted = [step_model.step(job, cost, 1, slowdown).seconds for job in jobs]
    return {
        "alpha_us": round(1e6 * link.alpha, 1),
        "beta_bytes_per_second": round(link.beta),
        "slowdown": round(slowdown, 3),
        "alone_ms": summary[WITHOUT_DDP]["step_ms"],
        "predicted_ms": round(1000 * median(predicted), 4),
        "measured_ms": summary[DDP]["step_ms"],
        "error": round(median(np.divide(predicted, times[DDP]).tolist()) - 1, 4),
    }
