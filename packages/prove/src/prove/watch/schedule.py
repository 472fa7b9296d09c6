"""Watch learning-rate schedules: how long are they, and which metrics decide about the rate?

A schedule that is stepped with each batch ends after some number of batches. To find it, a copy is
stepped ahead after the run, until its rate no longer changes.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from prove.rank_record import ScheduleRecord
from prove.watch.rank_run import RankRun, source_line, wrap

MAX_STEPS_AHEAD = 50_000  # limit of steps for a copy
MAX_SECONDS_AHEAD = 0.5  # time limit of these steps
REPEATED = ("CosineAnnealingWarmRestarts", "CyclicLR")  # schedules that never end
NO_CHANGE = 1e-12  # relative to the highest rate; a smaller change is rounding


class WatchedSchedule:
    """A scheduler that the script steps, and the rates that it set."""

    def __init__(self, scheduler: Any, record: ScheduleRecord) -> None:
        self.scheduler, self.record = scheduler, record
        self.rates = [rate_of(scheduler)]  # rate before the first step, and after each
        self.batches: dict[int, set[int]] = {}  # for each pass, the batches after which it stepped

    def note_step(self, run: RankRun) -> None:
        self.rates.append(rate_of(self.scheduler))
        self.record.step_count += 1
        if loader_pass := run.current_loader_pass:
            self.batches.setdefault(loader_pass.pass_index, set()).add(loader_pass.batches_given)

    def finish(self) -> None:
        record = self.record
        record.batches = sum(map(len, self.batches.values()))
        record.by_batch = any(len(batches) > 1 for batches in self.batches.values())
        if record.by_batch and record.class_name not in REPEATED:
            ahead, is_its_end = rates_ahead(self.scheduler)
            curve = [*self.rates, *ahead]
            record.highest_rate, record.length = max(curve), length_of(curve, is_its_end)


class ScheduleWatcher:
    """Knows all schedulers of this rank, in the order of their first steps."""

    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.watched: list[WatchedSchedule] = []
        self.depth = 0  # depth of nested calls of step()

    def step(self, original: Callable, scheduler: Any, args: tuple, kwargs: dict) -> Any:
        run = self.run
        if self.depth or run.current_loader_pass is None:  # another scheduler steps or makes it
            return original(scheduler, *args, **kwargs)
        at = source_line()
        if isinstance(scheduler, ReduceLROnPlateau):
            metric = args[0] if args else kwargs.get("metrics")
            for tell in run.events.metrics:
                tell(float(metric))  # type: ignore[arg-type]
        watched = self.watched_for(scheduler, at)
        self.depth += 1
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self.depth -= 1
            watched.note_step(run)

    def watched_for(self, scheduler: Any, at: str) -> WatchedSchedule:
        for watched in self.watched:
            if watched.scheduler is scheduler:
                return watched
        record = ScheduleRecord(type(scheduler).__name__, at)
        if isinstance(scheduler, OneCycleLR):
            record.total_steps = scheduler.total_steps
        self.run.record.schedules.append(record)
        self.watched.append(WatchedSchedule(scheduler, record))
        return self.watched[-1]

    def finish(self) -> None:
        self.depth += 1  # steps of our copies must not count
        for watched in self.watched:
            watched.finish()


def rate_of(scheduler: Any) -> float:
    return float(scheduler.optimizer.param_groups[0]["lr"])


def twin_of(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer without parameters, whose rate a scheduler may change."""
    twin = object.__new__(type(optimizer))
    groups = [
        copy.deepcopy({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]
    twin.__dict__ |= {
        "defaults": dict(optimizer.defaults), "state": {},
        "param_groups": [group | {"params": []} for group in groups],
    }  # fmt: skip
    return twin


def functions_in(scheduler: Any) -> Iterator[Any]:
    """Yield the functions of a scheduler; as bound methods, their objects must not be copied."""
    for value in vars(scheduler).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, LRScheduler):
                yield from functions_in(item)
            elif callable(item):
                yield item


def rates_ahead(scheduler: Any, steps: int = MAX_STEPS_AHEAD) -> tuple[list[float], bool]:
    """List the rates that a scheduler would set next, and say whether it came to its end.

    If it did not, the limit of time or steps was reached first.
    """
    rates: list[float] = []
    end = time.monotonic() + MAX_SECONDS_AHEAD
    try:
        memo = {id(function): function for function in functions_in(scheduler)}
        optimizer = scheduler.optimizer
        memo[id(optimizer)] = twin_of(optimizer)
        twin = copy.deepcopy(scheduler, memo)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while len(rates) < steps and time.monotonic() < end:
                twin.step()
                rates.append(rate_of(twin))
    except Exception:  # OneCycleLR after its last step, or any error of the script's schedule
        return rates, True
    return rates, False


def length_of(curve: list[float], is_its_end: bool = False) -> int | None:
    """Find after how many steps the rate stays constant; None if it never does."""
    highest = max(curve)
    if highest <= 0:  # nothing is trained, or a resumed schedule is past its end
        return None
    still = NO_CHANGE * highest
    top = next(n for n, rate in enumerate(curve) if rate > highest * (1 - 1e-6))
    rise = next((n for n in range(top + 1, len(curve)) if curve[n] > curve[n - 1] + still), None)
    fall = curve[top:rise]
    end = top + next(n for n, rate in enumerate(fall) if rate <= fall[-1] + still)
    if end == top:
        return end or None
    before = next(rate for rate in reversed(curve[:end]) if rate != curve[end])
    is_geometric = 0 < curve[end] < 1e-8 * highest and curve[end] > 0.01 * before
    still_falls = end == len(curve) - 1 and not is_its_end
    return None if is_geometric or still_falls else end


def install(run: RankRun) -> None:
    schedules = ScheduleWatcher(run)
    run.at_end.append(schedules.finish)

    def watch_steps(kind: type) -> None:
        if "step" in vars(kind):

            @wrap(kind, "step")
            def step(original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                return schedules.step(original, scheduler, args, kwargs)

    def watch_steps_of_all(kind: type) -> None:
        watch_steps(kind)
        for derived in kind.__subclasses__():
            watch_steps_of_all(derived)

    watch_steps_of_all(LRScheduler)

    def watch_new_class(kind: type, **more: Any) -> None:  # a class of the script
        watch_steps(kind)

    LRScheduler.__init_subclass__ = classmethod(watch_new_class)  # type: ignore[assignment]
