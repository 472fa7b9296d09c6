"""The time of a DDP step: predicted before it is measured, here and across slower links.

What the model in 04_ddp_torchrun/forecast/step_model.py needs is measured apart from DDP, in the
same rounds: steps without DDP, and convolutions with an all-reduce behind or beside them. Each end
of a link is a network namespace with one rank, made by launch/two_nodes_here.sh, which runs this
file.
"""

import copy
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from ranks import run_ranks
from tables import predictions
from timing import Effort, Results, Times, interleave, load_chapter, save, summarize
from training_step import build, ddp_without_buffers, make_step, sgd
from two_nodes import ALLOWED, RATES, on_two_nodes, set_rate

step_model = load_chapter("04", "forecast/step_model")
fill_buckets = load_chapter("04", "forecast/gradient_order").fill_buckets

# What is timed beside the steps of DDP. One all-reduce runs behind some work, and one beside more.
WITHOUT_DDP, WORK, LONG_WORK, BESIDE_WORK, COPY = "alone", "work", "long", "beside", "copy"
LONG, BYTES_BESIDE, BYTES_COPIED = 8, 2**23, 2**24  # LONG: times the work
SIZES = [2**14, 2**20, 2**22, BYTES_BESIDE, 2**24, 25 * 2**20]  # bytes of the one behind the work
SMALL_SIZES = [2**10, 2**17, 2**20, BYTES_BESIDE]  # for net: its bucket has 87,360


@dataclass(frozen=True)
class DDPVariant:
    """A step of DDP, with micro-batches under no_sync, or with gradients that are sent in bf16."""

    micro_batches: int = 1
    bf16: bool = False


DDP = "DDP"
VARIANTS = {
    DDP: DDPVariant(),
    "DDP, 4 with no_sync": DDPVariant(micro_batches=4),
    "DDP, bf16 hook": DDPVariant(bf16=True),
}


@dataclass(frozen=True)
class Profile:
    """Of a model on one rank. A share is the part of a step, or of backward until a gradient."""

    model: str
    local_batch: int
    gradient_bytes: list[int]
    forward_share: float
    backward_share: float
    ready_shares: list[float]


def behind_work(size: int) -> str:
    return f"work, then {size}"


def step_of(variant: DDPVariant, model: nn.Module, images: Tensor) -> Callable[[], None]:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = ddp_without_buffers(model)
        if variant.bf16:
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    return make_step(model, images, wrap, micro_batches=variant.micro_batches)


class StepWithoutDDP:
    """A step that notes when forward, backward, the optimizer and each gradient are done."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model, self.images = copy.deepcopy(model), images
        self.labels, self.optimizer = torch.arange(len(images)) % 10, sgd(self.model)
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

    def profile(self, name: str) -> Profile:
        """The medians of the steps."""
        forward, backward, end, *gradients = np.array(self.steps).T
        ready = [(gradient - forward) / (backward - forward) for gradient in gradients]
        return Profile(
            name,
            len(self.images),
            [parameter.nbytes for parameter in self.model.parameters()],
            float(np.median(forward / end)),
            float(np.median((backward - forward) / end)),
            np.median(ready, axis=1).tolist(),
        )


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


def time_on_rank(
    model_name: str, variants: list[str], rounds: int, sizes: list[int]
) -> tuple[Times, dict[str, Any]]:
    """What each rank does: seconds of all steps in each round, and the model's profile."""
    model, images = build(model_name, 16 if model_name == "resnet18" else 0)
    without_ddp = StepWithoutDDP(model, images)
    steps: dict[str, Callable] = {WITHOUT_DDP: without_ddp}
    steps |= {name: step_of(VARIANTS[name], model, images) for name in variants}
    times = interleave(steps | work_steps(sizes), rounds)
    return times, asdict(without_ddp.profile(model_name))


def measure_scaling(effort: Effort) -> Results:
    """`links` is empty unless all is measured where namespaces are allowed."""
    rounds, machine = {"net": 51, "mlp": 25, "resnet18": 15}, []
    for ranks in [effort.ranks or 2] if effort.ranks or effort.quick else (1, 2, 3, 4):
        for model in effort.models or (["net"] if effort.quick else rounds):
            max_rounds = rounds[model] // 4 if effort.brief else min(rounds[model], effort.rounds)
            sizes = SMALL_SIZES if model == "net" else SIZES
            answers = run_ranks(ranks, time_on_rank, model, [DDP], max_rounds, sizes)
            times, _ = answers[0]
            machine.append(predict(times, sizes, [Profile(**profile) for _, profile in answers]))
    with_links = effort.rounds > 99 and ALLOWED
    links = on_two_nodes("benchmarks/measure_scaling.py") if with_links else {}
    results = {"machine": machine, "links": links}
    errors = [abs(row["error"]) for row in predictions(results)]
    about = {"provenance": {"threads_a_rank": 1, "backend": "gloo"}, **results}
    return {**about, "median_error": round(median(errors), 4), "predictions": len(errors)}


def extra_seconds(times: Times, name: str, without: str) -> float:
    """The seconds that this takes more than that: the median of the rounds."""
    return float(np.median(np.subtract(times[name], times[without])))


def all_reduce_seconds(times: Times, size: int) -> float:
    """As in a step, ranks come to it from computing."""
    return max(extra_seconds(times, behind_work(size), WORK), 1e-6)


def fit(ranks: int, times: Times, sizes: list[int]) -> Any:
    """The link on which a ring takes the measured times, with the least relative error."""
    if ranks == 1:
        return step_model.Link(0.0, 1e15)
    messages = 2 * (ranks - 1)
    seconds = np.array([all_reduce_seconds(times, size) for size in sizes])
    matrix = np.array([(messages, messages / ranks * size) for size in sizes])
    # What is smaller than the scatter of the work before it must not count as if it were exact.
    weights = 1 / np.maximum(seconds, 0.1 * median(times[WORK]))
    alpha, per_byte = np.linalg.lstsq(matrix * weights[:, None], seconds * weights, rcond=None)[0]
    return step_model.Link(max(float(alpha), 0.0), 1 / max(float(per_byte), 1e-15))


def job_of(seconds: float, profiles: list[Profile], copy_seconds: float) -> Any:
    """A step of so many seconds; copy_seconds: per byte, in and out of a bucket."""
    forward = np.mean([profile.forward_share for profile in profiles])
    backward = np.mean([profile.backward_share for profile in profiles])
    ready = np.mean([profile.ready_shares for profile in profiles], axis=0).tolist()
    gradient_bytes = profiles[0].gradient_bytes
    order = sorted(zip(gradient_bytes, ready, strict=True), key=lambda gradient: gradient[1])
    # Backward fills the buckets; in the end they are emptied.
    one_way = copy_seconds * sum(gradient_bytes) / 2
    after_backward = (1 - forward - backward) * seconds + one_way
    buckets = fill_buckets(order)
    return step_model.Job(forward * seconds, backward * seconds + one_way, after_backward, buckets)


def ring_seconds(size: float, ranks: int, link: Any, share_of_fp32: float) -> float:
    return step_model.ring(size * share_of_fp32, ranks, link)


def predict(times: Times, sizes: list[int], profiles: list[Profile]) -> Results:
    """Every step of DDP in these rounds, predicted from what is not DDP, beside its measurement.

    profiles: of all ranks. An error is the median of the rounds': a slow minute slows both times.
    """
    ranks, summary = len(profiles), summarize(times)
    link = fit(ranks, times, sizes)
    # What a second of communication takes from the computing beside it.
    overlap_cost = extra_seconds(times, BESIDE_WORK, LONG_WORK)
    slowdown = min(1.0, max(0.0, overlap_cost / all_reduce_seconds(times, BYTES_BESIDE)))
    copy_seconds = median(times[COPY]) / BYTES_COPIED
    jobs = [job_of(seconds, profiles, copy_seconds) for seconds in times[WITHOUT_DDP]]
    rows = []
    for name, variant in VARIANTS.items():
        if name not in times:
            continue
        share = 0.5 if variant.bf16 else 1.0
        cost = partial(ring_seconds, ranks=ranks, link=link, share_of_fp32=share)
        steps = [step_model.step(job, cost, variant.micro_batches, slowdown) for job in jobs]
        pairs = zip(steps, times[name], strict=True)
        errors = [step.seconds / measured - 1 for step, measured in pairs]
        rows.append(
            {
                "ranks": ranks,
                "how": name,
                "rounds": len(jobs),
                "error": round(median(errors), 4),
                "model": profiles[0].model,
                "local_batch": profiles[0].local_batch,
                "alone_ms": summary[WITHOUT_DDP]["step_ms"],
                "measured_ms": summary[name]["step_ms"],
                "measured_ms_quartiles": summary[name]["step_ms_quartiles"],
                "predicted_ms": round(1000 * median(step.seconds for step in steps), 4),
            }
        )
    about = {"ranks": ranks, "alpha_us": round(1e6 * link.alpha, 1), "slowdown": round(slowdown, 3)}
    return {**about, "beta_bytes_per_second": round(link.beta), "rows": rows}


def predict_across_links(out: Path) -> None:
    """What each of two nodes does; node 0 writes the predictions across each link."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=2)
    links = {}
    for name, rate in RATES.items():
        set_rate(rate)
        sizes = SIZES[:-1] if name == "0.2 Gbit/s" else SIZES
        times, profile = time_on_rank("resnet18", list(VARIANTS), 9, sizes)
        profiles = [profile, profile]
        dist.all_gather_object(profiles, profile)
        links[name] = predict(times, sizes, [Profile(**each) for each in profiles])
    if dist.get_rank() == 0:
        save(out, links)
    dist.destroy_process_group()


if __name__ == "__main__":
    predict_across_links(Path(sys.argv[1]))
