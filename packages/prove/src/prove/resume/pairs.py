"""Pair the steps of the resumed run with those of the straight one."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from prove.rank_record import RankRecord
from prove.resume.record import StepStart
from prove.resume.runs import (
    ResumeRuns,
    Run,
    WrittenFile,
    checkpoints,
    ends_of_epochs,
    order_of_checkpoints,
)

TIME = re.compile(r"\d+(:\d\d)+(\.\d+)?")  # as 0:26 or 0:00:26, in printed text
LIMIT = 1e-7  # relative; a larger difference is one, unless the control differs as much
TIMES_NOISE = 10  # difference between two straight runs that a resumed one may have
MOST_NOISE = 1e-3  # if two straight runs differ by more, nothing is compared


def difference(one: Any, other: Any) -> float:
    """Relative difference of two projections or numbers, and 0.0 or 1.0 for anything else."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        length = max(one[1], other[1], 1e-30)
        return float(max(abs(a - b) for a, b in zip(one, other, strict=True)) / length)
    numbers = (int, float)
    if isinstance(one, float) and isinstance(other, numbers):
        return min(1.0, abs(one - other) / max(abs(one), abs(other), 1e-30))
    return float(one != other)


def largest(one: dict, other: dict, names: Iterable[str] | None = None) -> tuple[float, str]:
    """Return the largest difference of two dicts, and the name where it is."""
    chosen = list({**one, **other} if names is None else names)
    found = [(difference(one.get(name), other.get(name)), name) for name in chosen]
    return max(found, key=lambda pair: pair[0], default=(0.0, ""))


class Pairs:
    """The steps of the four runs, step i of the resumed run beside step k + i of the straight."""

    def __init__(self, runs: ResumeRuns, resumed: Run | None = None) -> None:
        """resumed: another resumed run than the last one."""
        self.runs = runs
        self.straight, self.control = runs.straight, runs.control
        self.stopped, self.resumed = runs.stopped, resumed or runs.resumed
        read = {each.path for part in self.resumed.parts for each in part.reads}
        self.used = [file for file in checkpoints(self.stopped) if file.path in read]
        last = [file.steps_before for file in self.used]
        self.k = max(last, default=self.stopped.steps)  # steps before the file was written
        self.same_ranks = len(self.straight.ranks) == len(self.resumed.ranks)
        self.noise = self.noise_of_control()
        self.limit = max(LIMIT, TIMES_NOISE * self.noise)
        self.same_draws = True  # draws.py finds out
        self.same_samples = True  # order.py finds out

    @property
    def ranks(self) -> list[tuple[list[StepStart], list[StepStart]]]:
        """For each rank: the straight run's steps from step k + 1 on, and the resumed run's."""
        return [
            ([start for start in one.starts if start.number >= self.k], other.starts)
            for one, other in zip(self.straight.parts, self.resumed.parts, strict=False)
        ]

    def first_steps(self, rank: int) -> list[tuple[StepStart, StepStart]]:
        """For each optimizer: its first step after the stop, without and with it."""
        one, other = self.ranks[rank]
        pairs = []
        for number in sorted({start.optimizer for start in one}):
            firsts = [
                next((start for start in starts if start.optimizer == number), None)
                for starts in (one, other)
            ]
            if firsts[0] is not None and firsts[1] is not None:
                pairs.append((firsts[0], firsts[1]))
        return pairs

    @property
    def has_as_many_steps(self) -> bool:
        return self.resumed.steps == self.straight.steps - self.k

    @property
    def is_inside_epoch(self) -> bool:
        return self.k not in ends_of_epochs(self.straight)

    def noise_of_control(self) -> float:
        """How far do the weights of two straight runs differ before their last common step?"""
        worst = 0.0
        for one, other in zip(self.straight.parts, self.control.parts, strict=False):
            for a, b in zip(one.starts, other.starts, strict=False):
                pairs = zip(a.weights, b.weights, strict=False)
                worst = max(worst, *(difference(x, y) for x, y in pairs), 0.0)
        return worst

    def name_of(self, optimizer: int, parameter: int) -> str:
        record: RankRecord = self.straight.ranks[0]
        names = record.optimizers[optimizer].names
        return names[parameter] if parameter < len(names) else f"tensor {parameter}"

    def first(self, find: Callable[[int], Any]) -> Any:
        """Return what is found on the first rank where anything is, or None."""
        found = (find(rank) for rank in range(len(self.ranks)))
        return next((each for each in found if each), None)


def newest_of(files: list[WrittenFile]) -> WrittenFile:
    return max(files, key=order_of_checkpoints)


def seconds_of(runs: Iterable[Run]) -> float:
    return sum(run.outcome.seconds for run in runs)
