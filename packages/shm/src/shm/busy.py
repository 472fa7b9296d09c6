"""Was the machine too busy for what was measured on it? One rule for every table of speeds.

    watch = LoadWatch()                             # before anything is measured
    ...                                             # ways in turns, the first one twice (A/A)
    load = watch.load()                             # as a file of results holds it
    reasons = why_busy(load, first, again)          # empty if the figures may be believed

Other programs take cores from a measurement, and a laptop that gets warm slows down in the middle
of it. Both show in three numbers: how much of the cores others used, how far the same program is
from itself (A/A), and how much its rounds vary. A ratio of two ways gets an interval, which is as
wide as its rounds and A/A make it. Where 1 is inside, the two cannot be told apart.
"""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

OTHERS_LIMIT = 0.1  # of all cores: more than that, used by other programs, is too much
AGAIN_LIMIT = 0.1  # the same program may be so far from itself
ROUNDS_LIMIT = 0.3  # of its median: so far its quartiles may be apart
MIN_ROUNDS = 5  # fewer give no interval

Load = dict[str, Any]  # load_before, other_cores, cores


class LoadWatch:
    """Measures how much of this machine other programs use from now on.

    It counts only the cores that this process may use, and needs Linux: elsewhere, and where
    /proc shows nothing, only the load average of the minute before is known.
    """

    def __init__(self) -> None:
        self.before, self.begin = os.getloadavg()[0], time.monotonic()
        self.busy, self.own = busy_seconds(), own_seconds()

    def load(self) -> Load:
        """Return the load: the average before, and the cores that others used since, on average.

        Call it when the processes that were measured have ended, or while they live: what they
        used counts as ours in both cases.
        """
        load: Load = {"load_before": round(self.before, 2), "cores": usable_cores()}
        seconds = time.monotonic() - self.begin
        if self.busy is not None and seconds:
            others = (busy_seconds() or 0) - self.busy - (own_seconds() - self.own)
            load["other_cores"] = round(max(0.0, others / seconds), 2)
        return load


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_seconds() -> float | None:
    """Return the seconds in which our cores have worked for anybody, a host's other guests too."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name in ours:  # user nice system idle iowait irq softirq steal, see man 5 proc_stat
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def own_seconds() -> float:
    """Return what this process, all below it and all that have ended there have used of cores."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        # utime stime cutime cstime: its own, and those of children that it has waited for
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    tree = [os.getpid()]
    for pid in tree:  # which grows meanwhile
        tree += children.get(pid, ())
    return sum(seconds.get(pid, 0) for pid in tree)


class Ratio(NamedTuple):
    """A ratio of two ways: the median of the rounds, and the 95 % interval of that median."""

    median: float
    low: float
    high: float

    def widened(self, by: float) -> "Ratio":
        """Widen by the factor that the same program is away from itself."""
        return Ratio(self.median, self.low / by, self.high * by)

    def inverse(self) -> "Ratio":
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)

    def text(self, form: str = ".2f") -> str:
        """Return the median with its interval; a ? and only the interval if 1 is inside."""
        if self.low == self.high == 1:  # what the others are compared with
            return f"{1:{form}}"
        low, high, one = (f"{each:{form}}" for each in (self.low, self.high, 1))
        # As they are printed: a reader who sees 1.00 there would miss the question mark.
        low_number, high_number, one_number = (float(each.strip("%")) for each in (low, high, one))
        middle = "?" if low_number <= one_number <= high_number else f"{self.median:{form}}"
        return f"{middle} ({low} to {high})"


def ratio_of(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Divide round by round; see median_interval."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median by ranks, which assumes no distribution.

    With fewer than nine values, it reaches from the least to the greatest. (So many of n values lie
    below the median as a fair coin shows heads in n throws: Conover, Practical Nonparametric
    Statistics, section 3.2.)
    """
    ordered, n = sorted(values), len(values)
    outside, probability = -1, 0.0  # values on each side, and that so few lie below the median
    while (probability := probability + math.comb(n, outside + 1) / 2**n) <= 0.025:
        outside += 1
    outside = max(0, outside)
    return ordered[outside], ordered[n - 1 - outside]


def away_from_itself(first: Sequence[float], again: Sequence[float]) -> float:
    """Return the factor, at least 1, that the same way is away from itself in the median round."""
    ratio = ratio_of(again, first).median
    return max(ratio, 1 / ratio)


def why_busy(load: Load, first: Sequence[float] = (), again: Sequence[float] = ()) -> list[str]:
    """Say why figures of this run cannot be believed, in a phrase each; empty if they can.

    first, again: the seconds of one way in each round, measured twice.
    """
    reasons = why_loaded(load)
    if len(first) >= MIN_ROUNDS:
        reasons += why_unsteady(away_from_itself(first, again), quantiles(first, n=4))
    return reasons


def why_loaded(load: Load) -> list[str]:
    """Say which other programs there were, as the system counts them."""
    cores = load["cores"]
    if load.get("other_cores", 0) > OTHERS_LIMIT * cores:
        return [f"other programs used {load['other_cores']:.1f} of {cores} cores"]
    if "other_cores" not in load and load.get("load_before", 0) > cores / 2:
        return [f"its load was {load['load_before']:.1f} before"]
    return []


def why_unsteady(away: float, quartiles: Sequence[float]) -> list[str]:
    """Say what the rounds show. away: as away_from_itself; quartiles: of the first way's rounds."""
    reasons, (low, middle, high) = [], quartiles
    if max(away, 1 / away) > 1 + AGAIN_LIMIT:
        reasons.append(f"the same program took {away:.2f} times as long as itself")
    if high - low > ROUNDS_LIMIT * middle:
        ends = f"{low / middle:.2f} and {high / middle:.2f}"
        reasons.append(f"its rounds differ (quartiles: {ends} times the median)")
    return reasons


def busy_line(reasons: Sequence[str]) -> str:
    return f"This machine was busy: {'; '.join(reasons)}. Measure again when it rests."
