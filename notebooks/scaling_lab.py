"""Measure what a message costs between ranks of this machine, and draw forecasts: notebook 04."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist

import step_model
from benchmarks.measure.timing import interleave_steps
from benchmarks.result_files import Results
from local_ranks.ranks import run_ranks
from plots import BLUE, ORANGE, SKY, WIDTH, legend_below, title_above
from step_model import Link


def time_all_reduces(rank: int, sizes: list[int], rounds: int) -> dict[int, float]:
    """Seconds by bytes: the median of the rounds, each of which sends every size once."""
    steps = {str(size): partial(dist.all_reduce, torch.zeros(size // 4)) for size in sizes}
    times = interleave_steps(steps, rounds)
    return {size: median(times[str(size)]) for size in sizes}


def seconds_of_all_reduces(world_size: int, sizes: list[int], rounds: int) -> dict[int, float]:
    """Time all-reduces of so many bytes between ranks of this machine: seconds, by bytes."""
    first, *_ = run_ranks(world_size, time_all_reduces, sizes, rounds)
    return first


def fit(seconds: dict[int, float], world_size: int) -> Any:
    """The link on which a ring takes these seconds, with the least relative error."""
    messages = 2 * (world_size - 1)
    rows = [(messages / s, messages / world_size * size / s) for size, s in seconds.items()]
    alpha, per_byte = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return Link(max(float(alpha), 0.0), 1 / max(float(per_byte), 1e-15))


def step_on(job: step_model.Job, gbit: float, ranks: int = 8) -> Any:
    """Forecast a step of ranks that each have a cable of so many Gbit/s, with α = 50 µs."""
    link = Link(50e-6, gbit * 1e9 / 8)
    return step_model.step(job, partial(step_model.ring, world_size=ranks, link=link))


def draw_step(job: step_model.Job, gbit: float) -> None:
    step, forward = step_on(job, gbit), 1000 * job.forward
    axis = plt.subplots(figsize=(WIDTH, 2.4))[1]
    for name, left, width, color in (
        ("forward", 0, forward, SKY),
        ("backward", forward, 1000 * job.backward, BLUE),
    ):
        axis.barh("computing", width, left=left, color=color)
        axis.text(left + width / 2, 0, name, ha="center", va="center", color="white")
    for _, begin, end in step.spans:
        times = {"left": 1000 * begin, "width": 1000 * (end - begin)}
        axis.barh("messages", color=ORANGE, edgecolor="black", hatch="//", **times)
    axis.axvline(1000 * step.seconds, color="black", linestyle=":")
    axis.set(xlabel="ms since the step began")
    title_above(axis, f"{gbit:g} Gbit/s: the step ends after {1000 * step.seconds:.0f} ms")
    plt.show()


def draw_predictions(rows: Sequence[Results]) -> None:
    """Draw each predicted step over the measured one, on axes on which a ratio is a distance."""
    axis = plt.subplots(figsize=(WIDTH, 5.2))[1]
    links = dict.fromkeys(row["link"] for row in rows)
    for link, marker in zip(links, "os^Dv", strict=True):
        points = [(r["measured_ms"], r["predicted_ms"]) for r in rows if r["link"] == link]
        name = link if link == "one machine" else f"two machines, {link}"
        axis.plot(*zip(*points, strict=True), marker, label=name, alpha=0.8)
    axis.axline((10, 10), (1000, 1000), color="gray", linewidth=1, zorder=0)
    axis.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    axis.set_xticks(ticks := (10, 100, 1000), labels := ("10", "100", "1,000"))
    axis.set_yticks(ticks, labels)
    title_above(axis, f"{len(rows)} steps of DDP: forecast and measurement")
    legend_below(axis, ncols=2)
    plt.show()


def draw_efficiencies(lines: Mapping[str, Sequence[float]], gpus: Sequence[int]) -> None:
    axis = plt.subplots(figsize=(WIDTH, 4.4))[1]
    for (name, efficiencies), marker in zip(lines.items(), "os^Dv", strict=False):
        axis.plot(gpus, [100 * each for each in efficiencies], marker=marker, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(gpus, [f"{n:,}" for n in gpus])
    axis.set(xlabel="GPUs", ylabel="efficiency, %", ylim=(0, 105))
    title_above(axis, "ResNet-50 on nodes of 8 GPUs: a forecast")
    legend_below(axis, ncols=2)
    plt.show()
