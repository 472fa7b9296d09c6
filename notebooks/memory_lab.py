"""How many bytes does a rank hold in a step of your choice? For notebook 02."""

from typing import Any

import torch
import torch.distributed as dist

import peak
from benchmarks.measure.memory import BytesOf, CountedStep, ddp, stage_02_memory
from benchmarks.result_files import MIB, Results
from local_ranks.ranks import run_ranks
from plots import HELD, draw_bytes

__all__ = [
    "draw_bytes",
    "draw_change",
    "draw_ways",
    "held_by_rank",
    "held_by_replicas",
    "mib",
    "rehearsed_peak",
]


def take_steps(rank: int, plan: peak.Plan, batch: int, options: dict[str, Any]) -> BytesOf:
    return CountedStep(plan, batch // dist.get_world_size(), **options).held()


def held_by_rank(
    model: str = "resnet18",
    pixels: int = 64,
    batch: int = 64,
    optimizer: str = "momentum",
    ranks: int = 1,
    bf16: bool = False,
) -> BytesOf:
    """Take two steps on ranks of this machine, and count by kind what rank 0 then holds.

    batch: the global batch. One rank is stage 01, more are stage 04.
    """
    plan = peak.Plan(model, pixels, optimizer, "cpu")
    options: dict[str, Any] = {"dtype": torch.bfloat16} if bf16 else {}
    if ranks > 1:
        options["wrap"] = ddp
    first, *_ = run_ranks(ranks, take_steps, plan, batch, options, quiet=True)
    return first


def held_by_replicas(replicas: int, loss_inside_forward: bool = False) -> list[int]:
    """How many MiB each replica of DataParallel holds, of a small language model (memory.py)."""
    example = stage_02_memory.examples()["words"]
    held = stage_02_memory.held_by_replica(example, replicas, loss_inside_forward)
    return [round(mib(each)) for each in held]


def rehearsed_peak(model: str, pixels: int, micro_batch: int, number: int) -> float:
    """MiB at the peak of a step with Adam in so many micro-batches, by fit.py's rehearsal."""
    plan = peak.Plan(model, pixels, "adam")
    most, _ = peak.rehearsed_peak(plan, micro_batch, number)
    return most / MIB


def mib(held: BytesOf) -> float:
    return sum(held.values()) / MIB


def draw_change(before: BytesOf, after: BytesOf, change: dict[str, Any]) -> None:
    name = ", ".join(f"{key}={value}" for key, value in change.items())
    draw_bytes("What a rank holds", {"before": [before], name or "no change": [after]})


def draw_ways(ways: Results) -> None:
    """Draw the peak of a rank with each way to hold less, compared with that of the first."""
    peaks = {way: max(row["peak_bytes"]) for way, row in ways.items()}
    first, *others = peaks.values()
    bars = {way: [dict(row["held"][0])] for way, row in ways.items()}
    for way, [held] in bars.items():
        held["at the peak"] = max(0, peaks[way] - sum(held.values()))
    texts = [f"{first / MIB:.0f} MiB", *(f"{other / first - 1:+.0%}" for other in others)]
    draw_bytes("The peak of a rank", bars, {**HELD, "at the peak": ("#DDDDDD", "")}, texts)
