"""The time of a DDP step: predicted before it is measured, here and across slower links.

What the model in 04_ddp_torchrun/alpha_beta.py needs is measured apart from DDP, in the same
rounds: steps without DDP, and convolutions with an all-reduce behind or beside them. Each end of a
link is a network namespace with one rank, made by launch/two_nodes_here.sh.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from links import ALLOWED, RATES, on_two_nodes, set_rate
from plots import BLUE, GRAY, GREEN, ORANGE, Figure
from step import build, ddp, make_step, sgd, start
from tables import predictions
from timing import Effort, Results, Times, chapter, interleave, summarize

paper = chapter("04", "alpha_beta")
fill_buckets = chapter("04", "gradient_order").fill_buckets

DDP, NO_SYNC, BF16 = "DDP", "DDP, 4 with no_sync", "DDP, bf16 hook"
HOW = {DDP: (1, 1.0), NO_SYNC: (4, 1.0), BF16: (1, 0.5)}  # micro-batches; of fp32's bytes
ALONE, WORK, AFTER, LONG, BESIDE, COPY = "alone", "work", "work, then", "long", "beside", "copy"
TIMES, MEANWHILE, COPIED = 8, 2**23, 2**24  # long work is so much; bytes beside it; bytes copied
SIZES = [2**14, 2**20, 2**22, MEANWHILE, 2**24, 25 * 2**20]  # bytes
SMALL = [2**10, 2**17, 2**20, MEANWHILE]  # for net: its bucket has 87,360


def step_of(how: str, model: nn.Module, images: Tensor) -> Callable[[], None]:
    """What one step of this variant of DDP does; of NO_SYNC: four of them."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = ddp(model)
        if how == BF16:
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    return make_step(model, images, wrap, micro_batches=HOW[how][0])


def tick() -> Any:
    """Now; on a GPU, an event that the CPU does not wait for."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def alone(model: nn.Module, images: Tensor) -> tuple[Callable[[], None], Callable[[], list[float]]]:
    """A step without DDP; and its shares: of it forward, backward; of that, until each gradient."""
    model, labels = copy.deepcopy(model), torch.arange(len(images)) % 10
    optimizer, ready, notes = sgd(model), dict[Tensor, Any](), list[list]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ready.update({p: tick()}))

    def step() -> None:
        ticks = [tick()]
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        ticks.append(tick())
        loss.backward()
        ticks.append(tick())
        optimizer.step()
        notes.append([*ticks, tick(), *(ready[each] for each in model.parameters())])

    def since(first: Any, second: Any) -> float:
        return second - first if isinstance(first, float) else first.elapsed_time(second)

    def shares() -> list[float]:
        ticks = np.array([[since(row[0], each) for each in row] for row in notes])
        _, forward, backward, end, *gradients = ticks.T
        each = [(gradient - forward) / (backward - forward) for gradient in gradients]
        return np.median([forward / end, (backward - forward) / end, *each], axis=1).tolist()

    return step, shares


def work_steps(sizes: list[int]) -> dict[str, Callable]:
    """Work; work, then an all-reduce of each size; long work, one all-reduce beside it; a copy."""
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).requires_grad_(False)
    images, tensors = torch.randn(4, 64, 32, 32), {size: torch.zeros(size // 4) for size in sizes}
    here, there = torch.zeros(2, COPIED // 4)

    def work(times: int = 1) -> None:
        for _ in range(times):
            layer(images)

    def then_reduce(size: int) -> None:
        work()
        dist.all_reduce(tensors[size])

    def reduce_meanwhile() -> None:
        under_way = dist.all_reduce(tensors[MEANWHILE], async_op=True)
        work(TIMES)
        under_way.wait()

    def there_and_back() -> None:  # into a bucket, divided, and out of it
        torch.mul(here, 0.5, out=there)
        here.copy_(there)

    found: dict[str, Callable] = {WORK: work, COPY: there_and_back, LONG: partial(work, TIMES)}
    found |= {f"{AFTER} {size}": partial(then_reduce, size) for size in sizes}
    return found | {BESIDE: reduce_meanwhile}


def rounds_of(name: str, hows: list[str], rounds: int, sizes: list[int]) -> tuple[Times, Results]:
    """What each rank does: seconds of all variants in each round, and notes of the model."""
    model, images = build(name, 16 if name == "resnet18" else 0)
    step, shares = alone(model, images)
    steps = {ALONE: step, **{how: step_of(how, model, images) for how in hows}}
    times = interleave(steps | work_steps(sizes), rounds)
    gradients = [parameter.nbytes for parameter in model.parameters()]
    about = {"model": name, "gradients": gradients, "local_batch": len(images)}
    return times, about | {"shares": shares()}


def measure_scaling(effort: Effort) -> Results:
    """`links` is empty unless all is measured on a CPU where namespaces are allowed."""
    rounds, machine = {"net": 51, "mlp": 25, "resnet18": 15}, []
    for ranks in [effort.ranks or 2] if effort.ranks or effort.quick else (1, 2, 3, 4):
        for model in effort.models or (["net"] if effort.quick else rounds):
            max_rounds = rounds[model] // 4 if effort.brief else min(rounds[model], effort.rounds)
            what = model, [DDP], max_rounds, SMALL if model == "net" else SIZES
            answers = start(ranks, rounds_of, *what, device=effort.device)
            machine.append(predict(answers[0][0], [note for _, note in answers]))
    whole = effort.rounds > 99 and effort.device == "cpu" and ALLOWED
    found: Results = {"provenance": {"threads_a_rank": 1, "backend": "gloo"}, "machine": machine}
    found["links"] = on_two_nodes("scaling") if whole else {}
    errors = [abs(row["error"]) for row in predictions(found)]
    return {**found, "median_error": round(median(errors), 4), "predictions": len(errors)}


def extra_seconds(times: Times, name: str, without: str) -> float:
    """The seconds that this takes more than that: the median of the rounds."""
    return float(np.median(np.subtract(times[name], times[without])))


def all_reduce_seconds(times: Times) -> dict[int, float]:
    """Seconds of an all-reduce, by its bytes. As in a step, ranks come to it from computing."""
    sizes = [int(name.removeprefix(AFTER)) for name in times if name.startswith(AFTER)]
    return {size: max(extra_seconds(times, f"{AFTER} {size}", WORK), 1e-6) for size in sizes}


def fit(ranks: int, times: Times) -> Any:
    """The link on which a ring takes the measured times, with the least relative error."""
    if ranks == 1:
        return paper.Link(0.0, 1e15)
    found, messages = all_reduce_seconds(times), 2 * (ranks - 1)
    seconds = np.array(list(found.values()))
    matrix = np.array([(messages, messages / ranks * size) for size in found])
    # What is smaller than the scatter of the work before it must not count as if it were exact.
    weights = 1 / np.maximum(seconds, 0.1 * median(times[WORK]))
    alpha, per_byte = np.linalg.lstsq(matrix * weights[:, None], seconds * weights, rcond=None)[0]
    return paper.Link(max(float(alpha), 0.0), 1 / max(float(per_byte), 1e-15))


def job_of(seconds: float, shares: list[float], gradients: list[int], handling: float) -> Any:
    forward, backward, *ready = shares
    order = sorted(zip(gradients, ready, strict=True), key=lambda gradient: gradient[1])
    each = handling * sum(gradients) / 2  # backward fills the buckets; in the end they are emptied
    rest = (1 - forward - backward) * seconds + each
    return paper.Job(forward * seconds, backward * seconds + each, rest, fill_buckets(order))


def predict(times: Times, notes: list[Results]) -> Results:
    """Every step of DDP in these rounds, predicted from what is not DDP, beside its measurement.

    notes: of each rank. An error is the median of the rounds': a slow minute slows both times.
    """
    ranks, link, timed = len(notes), fit(len(notes), times), summarize(times)
    # what a second of communication takes from the computing beside it
    slowdown = min(
        1.0, max(0.0, extra_seconds(times, BESIDE, LONG) / all_reduce_seconds(times)[MEANWHILE])
    )
    handling = median(times[COPY]) / COPIED  # seconds per byte, in and out of a bucket
    shares = np.mean([note["shares"] for note in notes], axis=0).tolist()
    jobs = [job_of(each, shares, notes[0]["gradients"], handling) for each in times[ALONE]]
    rows = []
    for how in (name for name in HOW if name in times):
        micro_batches, wire = HOW[how]

        def cost(size: float, wire: float = wire) -> float:
            return paper.ring(size * wire, ranks, link)

        found = [paper.step(each, cost, micro_batches, slowdown).seconds for each in jobs]
        errors = [p / m - 1 for p, m in zip(found, times[how], strict=True)]
        row = {"ranks": ranks, "how": how, "rounds": len(jobs), "error": round(median(errors), 4)}
        row |= {key: notes[0][key] for key in ("model", "local_batch")}
        row |= {"alone_ms": timed[ALONE]["step_ms"], "measured_ms": timed[how]["step_ms"]}
        row["measured_ms_quartiles"] = timed[how]["step_ms_quartiles"]
        rows.append({**row, "predicted_ms": round(1000 * median(found), 4)})
    about = {"ranks": ranks, "alpha_us": round(1e6 * link.alpha, 1), "slowdown": round(slowdown, 3)}
    return {**about, "beta_bytes_per_second": round(link.beta), "rows": rows}


def scaling_on_node() -> Results:
    """The predictions across each link, on each of two nodes."""
    found = dict[str, Any]()
    for name, rate in RATES.items():
        set_rate(rate)
        times, note = rounds_of("resnet18", list(HOW), 9, SIZES[:-1] if "0." in name else SIZES)
        notes = [note, note]
        dist.all_gather_object(notes, note)
        found[name] = predict(times, notes)
    return found


def draw_scaling(results: Results) -> Figure:
    figure, axis = plt.subplots(figsize=(10, 5), layout="constrained")
    rows, where = predictions(results), results["provenance"]
    looks = {"net": (BLUE, "o"), "mlp": (ORANGE, "s"), "resnet18": (GREEN, "^")}
    for model, (color, mark) in looks.items():
        places = [place for place, row in enumerate(rows) if row["model"] == model]
        found = [100 * rows[place]["error"] for place in places]
        axis.plot(places, found, ls="", color=color, marker=mark, label=model)
    axis.axhspan(-10, 10, color=GRAY, alpha=0.2, label="within 10 %")
    axis.axhline(0, color="black", linewidth=0.8)
    names = {True: "ranks: {ranks}", False: "{link}, {how}"}
    texts = [names[row["link"] == "one machine"].format(**row) for row in rows]
    axis.set_xticks(range(len(rows)), texts, rotation=90, fontsize="small")
    axis.set(title="Error of each predicted step of DDP", ylabel="predicted / measured − 1, %")
    axis.legend(fontsize="small")
    figure.suptitle(f"{where['hardware']}, torch {where['torch']}; one thread per rank, gloo")
    return figure
