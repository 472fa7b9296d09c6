"""From what the profiler saw to the parts of a training step: pure functions on events.

Every moment of a step belongs to one of PARTS. See timeline.py, which measures and draws.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

PARTS = ("data", "forward", "backward", "waiting for others", "optimiser", "other")
WAITING, OTHER = PARTS[3], PARTS[5]
FORWARD, BACKWARD = "benchmark: forward", "benchmark: backward"  # our marks in the profile
GAP_MS = 0.1  # a shorter one between two operators is the program's own

Span = tuple[float, float]  # from when to when, ms


@dataclass(frozen=True)
class Event:
    """What the profiler saw: times in ms; thread: its number for it."""

    name: str
    start: float
    end: float
    thread: int

    @property
    def span(self) -> Span:
        return self.start, self.end


# --- Spans of time: lists of (from, to), in order and apart from each other


def union(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """What any of them covers; two that are no further apart than the gap become one."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], high)
        elif high > low:
            found.append((low, high))
    return found


def both(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """What both cover."""
    pairs = [(max(a, c), min(b, d)) for a, b in union(one) for c, d in union(other)]
    return [(low, high) for low, high in sorted(pairs) if high > low]


def without(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """What the first covers and the second does not."""
    cuts = union(other)
    ends = [float("-inf"), *(edge for span in cuts for edge in span), float("inf")]
    return both(one, list(zip(ends[::2], ends[1::2], strict=True)))


def length(spans: Iterable[Span]) -> float:
    return sum(high - low for low, high in union(spans))


# --- From events to the parts of a step


def is_collective(event: Event) -> bool:
    return event.name.startswith(("gloo:", "nccl:"))


def is_autograd(event: Event) -> bool:
    return event.name.startswith("autograd::engine")


def steps_of(events: list[Event]) -> list[list[Event]]:
    """The events of each step: from one call for a batch to the next; the last has no end.

    Every step gets a mark of that name which tells its thread and its span.
    """
    calls = sorted(e.start for e in events if e.name.startswith("enumerate(DataLoader)"))
    thread = next(e.thread for e in events if e.name.startswith("enumerate(DataLoader)"))
    found = []
    for low, high in pairwise(calls):
        inside = [e for e in events if low <= e.start < high]
        found.append([Event("step", low, high, thread), *inside])
    return found


def phases(step: list[Event]) -> dict[str, list[Span]]:
    """What the main thread is busy with by name, before the waiting is taken out."""
    mine = [e for e in step if e.thread == step[0].thread]

    def named(*names: str) -> list[Span]:
        return union(e.span for e in mine if e.name.startswith(names))

    loss = [e.end for e in mine if e.name == "aten::cross_entropy_loss"]
    forward = [(low, max(loss, default=high)) for low, high in named(FORWARD)]
    return {
        "data": named("enumerate(DataLoader)"),
        "forward": forward,
        "backward": named(BACKWARD),
        "optimiser": named("Optimizer."),
    }


def waits(step: list[Event]) -> list[Span]:
    """When the rank waits: no operator of its loop runs, and a collective is under way.

    The loop's threads: the main one, and for a GPU the one on which autograd runs.
    """
    whole = step[0].span
    threads = {step[0].thread} | {e.thread for e in step if is_autograd(e)}
    operators = [e.span for e in step if e.thread in threads and e.name.startswith("aten::")]
    under_way = [e.span for e in step if is_collective(e)]
    idle = [gap for gap in without([whole], operators) if gap[1] - gap[0] >= GAP_MS]
    return [gap for gap in idle if both([gap], under_way)]


def parts_of(step: list[Event]) -> dict[str, list[Span]]:
    """The step cut into PARTS: every moment belongs to one of them."""
    waiting = waits(step)
    parts = {name: without(spans, waiting) for name, spans in phases(step).items()}
    parts[WAITING] = waiting
    known = [span for spans in parts.values() for span in spans]
    parts[OTHER] = without([step[0].span], known)
    return {name: parts[name] for name in PARTS}


def averaging(step: list[Event]) -> list[Event]:
    """The collectives from the start of backward to the optimiser's step: those of gradients."""
    low = min((e.start for e in step if e.name == BACKWARD), default=0.0)
    high = min((e.start for e in step if e.name.startswith("Optimizer.step")), default=0.0)
    return [e for e in step if is_collective(e) and low <= e.start < high]


def hidden_share(step: list[Event]) -> float | None:
    """Of the time in which gradients are under way, the share in which the main thread works."""
    under_way = [e.span for e in averaging(step)]
    if not under_way:
        return None
    return 1 - length(both(under_way, waits(step))) / length(under_way)


def rows_of(step: list[Event]) -> dict[str, list[tuple[str, float, float]]]:
    """What each thread does: blocks (what, from, to) in ms from the start of the step."""
    zero, main = step[0].span[0], step[0].thread
    threads = defaultdict(list)
    for event in sorted(step, key=lambda e: e.start):
        if event.thread != main:
            threads[event.thread].append(event)
    rows = {"main thread": [(n, *span) for n, spans in parts_of(step).items() for span in spans]}
    for events in threads.values():
        name, what = "replica thread", "forward"
        spans = union((e.span for e in events if e.name.startswith("aten::")), GAP_MS)
        if any(map(is_autograd, events)):
            name, what = "autograd thread", "backward"
        elif any(map(is_collective, events)):
            name, what = "gloo thread", "collective"
            spans = [e.span for e in events if is_collective(e)]
        count = 1 + sum(row.startswith(name) for row in rows)
        if spans:
            rows[f"{name} {count}"] = [(what, *span) for span in spans]
    return {
        row: [(what, round(low - zero, 3), round(high - zero, 3)) for what, low, high in blocks]
        for row, blocks in rows.items()
    }


def summarize_steps(steps: list[list[Event]]) -> dict[str, Any]:
    """Of the steps of middle length, half of all, the mean of each part; the median one's threads.

    Means of the same steps add up, medians of parts would not.
    """
    steps = sorted(steps, key=lambda step: length([step[0].span]))
    middle = steps[len(steps) // 4 : -(len(steps) // 4) or None]
    hidden = [share for share in map(hidden_share, steps) if share is not None]
    total = statistics.fmean(length([step[0].span]) for step in middle)
    parts = {
        name: statistics.fmean(length(parts_of(step)[name]) for step in middle) for name in PARTS
    }
    return {
        "steps": len(steps),
        "step_ms": round(total, 3),
        "parts_ms": {name: round(ms, 3) for name, ms in parts.items()},
        "parts_share": {name: round(ms / total, 4) for name, ms in parts.items()},
        "collectives_a_step": statistics.median_low(sum(map(is_collective, s)) for s in steps),
        "from_backward_on": statistics.median_low(len(averaging(s)) for s in steps),
        "hidden_share": round(statistics.median(hidden), 4) if hidden else None,
        "threads": rows_of(steps[(len(steps) - 1) // 2]),
    }
