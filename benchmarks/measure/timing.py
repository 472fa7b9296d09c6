"""How this project times: variants take turns in one run, and are compared round by round.

A shared machine is faster in one minute and slower in the next, but two variants in one round run
under almost the same conditions. Each round runs the variants in a random order, the first of them
twice. The distance of its ratio to itself from 1 (A/A) shows how far to trust the other ratios.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.result_files import Results
from local_ranks.machine import KEEP_FREED_MEMORY, set_malloc
from shm.busy import ratio_of

AA = "A/A"  # the first variant once more

Times = dict[str, list[float]]  # by variant: the seconds per step in each round
VariantSteps = Mapping[str, Callable[[], object]]  # by variant: what one step does


@dataclass(frozen=True)
class Effort:
    rounds: int = 1000  # upper limit for each comparison
    quick: bool = False  # as little as shows that it runs
    device: str = "cpu"


def interleave_runs(runs: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Make each run in every round, in a random order; a run returns its seconds per step."""
    times: Times = {name: [] for name in runs}
    order = random.Random(0)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            times[name].append(runs[name]())
    return {name: largest_of_ranks(seconds) for name, seconds in times.items()}


def timed(step: Callable[[], object], steps: int) -> Callable[[], float]:
    """Make a run of so many steps, on all ranks together, that returns the seconds of one."""

    def seconds_per_step() -> float:
        if dist.is_initialized():
            dist.barrier()  # ranks start together
        start = synchronized_time()
        for _ in range(steps):
            step()
        return (synchronized_time() - start) / steps

    return seconds_per_step


def interleave_steps(variants: VariantSteps, rounds: int, steps: int = 1) -> Times:
    """Take so many steps of each variant in every round, timed by the slowest rank's clock."""
    set_malloc(KEEP_FREED_MEMORY)
    for step in variants.values():
        for _ in range(min(3, rounds)):  # DDP rearranges its buckets after the first step
            step()
    runs = {name: timed(step, steps) for name, step in variants.items()}
    return interleave_runs({**runs, AA: runs[next(iter(runs))]}, rounds)


def largest_of_ranks(seconds: list[float]) -> list[float]:
    if not dist.is_initialized():
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def synchronized_time() -> float:
    """Read the clock when the GPU has finished, which runs behind the program."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def ratio_to(baseline: list[float], seconds: list[float]) -> tuple[float, list[float]]:
    """Compute the median of the rounds' ratios, and its 95 % interval."""
    ratio = ratio_of(seconds, baseline)
    return round(ratio.median, 4), [round(ratio.low, 4), round(ratio.high, 4)]


def summarize(times: Times) -> dict[str, Results]:
    """Summarize each variant: its median step in ms, and its ratio to the first variant."""
    baseline = next(iter(times.values()))
    summary = {}
    for name, seconds in times.items():
        low, median, high = 1000 * np.percentile(seconds, [25, 50, 75], method="weibull")
        ratio, interval = ratio_to(baseline, seconds)
        summary[name] = {
            "step_ms": round(float(median), 4),
            "step_ms_quartiles": [round(float(low), 4), round(float(high), 4)],
            "ratio": ratio,
            "ratio_interval": interval,
        }
    return summary
