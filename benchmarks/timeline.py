"""Where the time of a step goes, and what happens at the same time, from torch.profiler.

Each stage trains with its own loop (stages.py); nothing in it is changed. The profiler tells every
operator of every thread, and the collectives on gloo's own threads. What it does not name is marked
from outside: the model's forward by hooks, backward by a wrapper around Tensor.backward. Every
moment of a step, a microsecond, then belongs to one of PARTS.

The network is resnet18, so that the gradients, 45 MB, take a while to send: DDP puts them into
three buckets, of 1, 25 and again 25 MiB at most. Those of net-bn fit into one: nothing overlaps.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch.profiler import ProfilerActivity, profile, record_function

from plots import BLUE, GREEN, GREY, PINK, RED, SKY, YELLOW, patches
from stages import Training, Variant, start
from timing import Effort, Results

RANKS, BATCH = 2, 64  # BATCH: the global one
NAMES = ("01 one process", "02 DataParallel", "03 by hand", "04 DDP", "05 DDP, SyncBN")
STAGES = {name[:2]: name for name in NAMES}
FORWARD, BACKWARD = "benchmark: forward", "benchmark: backward"  # our marks in the profile
COLLECTIVES, AUTOGRAD, LOADING = ("gloo:", "nccl:"), "autograd::engine", "enumerate(DataLoader)"
MARKS = {"data": LOADING, "forward": FORWARD, "backward": BACKWARD, "optimiser": "Optimizer."}
GAP = 100  # a shorter one between two operators, in us, is the program's own
WAITING = "waiting for others"
PARTS = ("data", "forward", "backward", WAITING, "optimiser", "other")
COLOURS = (YELLOW, SKY, BLUE, RED, GREEN, GREY, PINK)
HATCHES = ("", "", "//", "xx", "\\\\", "", "..")
LOOKS = dict(zip((*PARTS, "collective"), zip(COLOURS, HATCHES, strict=True), strict=True))


@dataclass(frozen=True)
class Event:
    """What the profiler saw: times in us from the start of the step; thread: its number for it."""

    name: str
    start: int
    end: int
    thread: int


@dataclass(frozen=True)
class Step:
    """From one call for a batch to the next. length: in us; thread: the one that calls."""

    events: list[Event]
    length: int
    thread: int

    def of(self, *names: str, threads: Iterable[int] = ()) -> list[Event]:
        """The events whose name starts so; on any thread if none is given."""
        found = [e for e in self.events if e.name.startswith(names)]
        return [e for e in found if not threads or e.thread in threads]

    def cover(self, events: Iterable[Event]) -> np.ndarray:
        """For each microsecond of the step: whether any of them is under way."""
        found = np.zeros(self.length, bool)
        for event in events:
            found[event.start : event.end] = True
        return found

    def waiting(self) -> np.ndarray:
        """When no operator of the loop runs, and a collective is under way.

        The loop's threads: the main one, and for a GPU the one on which autograd runs.
        """
        loop = {self.thread} | {e.thread for e in self.of(AUTOGRAD)}
        under_way, found = self.cover(self.of(*COLLECTIVES)), np.zeros(self.length, bool)
        for low, high in runs(~self.cover(self.of("aten::", threads=loop))):
            found[low:high] = high - low >= GAP and under_way[low:high].any()
        return found

    def parts(self) -> dict[str, np.ndarray]:
        """The step cut into PARTS: every microsecond belongs to one of them."""
        mine = [self.thread]
        found = {part: self.cover(self.of(name, threads=mine)) for part, name in MARKS.items()}
        (forward,), (loss,) = self.of(FORWARD), self.of("aten::cross_entropy_loss")
        found["forward"][forward.start : loss.end] = True
        waiting = self.waiting()
        found = {part: mask & ~waiting for part, mask in found.items()} | {WAITING: waiting}
        return found | {"other": ~np.any(list(found.values()), axis=0)}

    def averaging(self) -> list[Event]:
        """The collectives from the start of backward to the optimizer's step: of gradients."""
        low, high = (min(e.start for e in self.of(name)) for name in (BACKWARD, "Optimizer.step"))
        return [e for e in self.of(*COLLECTIVES) if low <= e.start < high]

    def hidden_share(self) -> float | None:
        """Of the time in which gradients are under way, the share in which the loop works."""
        under_way = self.cover(self.averaging())
        return 1 - float(self.waiting()[under_way].mean()) if under_way.any() else None

    def rows(self) -> dict[str, list[tuple[str, float, float]]]:
        """What each thread does: blocks (what, from, to) in ms."""
        masks = {"main thread": self.parts()}
        for thread in dict.fromkeys(e.thread for e in self.events if e.thread != self.thread):
            name, what, kinds = "replica thread", "forward", ["aten::"]
            if self.of(AUTOGRAD, threads=[thread]):
                name, what = "autograd thread", "backward"
            elif self.of(*COLLECTIVES, threads=[thread]):
                name, what, kinds = "gloo thread", "collective", [*COLLECTIVES]
            mask = self.cover(self.of(*kinds, threads=[thread]))
            for low, high in runs(~mask):
                mask[low:high] = low > 0 and high < self.length and high - low <= GAP
            if mask.any():
                masks[f"{name} {1 + sum(row.startswith(name) for row in masks)}"] = {what: mask}
        found: dict[str, list[tuple[str, float, float]]] = {row: [] for row in masks}
        for row, each in masks.items():
            for what, mask in each.items():
                found[row] += [(what, low / 1000, high / 1000) for low, high in runs(mask)]
        return found


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """From where to where it is true."""
    edges = np.flatnonzero(np.diff(np.pad(mask.astype(np.int8), 1)))
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


def summarize_steps(steps: list[Step]) -> Results:
    """Of the steps of middle length, half of all, the mean of each part; the median one's threads.

    Means of the same steps add up, medians of parts would not.
    """
    steps = sorted(steps, key=lambda step: step.length)
    middle = steps[len(steps) // 4 : -(len(steps) // 4) or None]
    hidden = [share for share in (step.hidden_share() for step in steps) if share is not None]
    total, cut = sum(step.length for step in middle), [step.parts() for step in middle]
    parts = {part: sum(int(each[part].sum()) for each in cut) for part in PARTS}
    return {
        "steps": len(steps),
        "step_ms": round(total / len(middle) / 1000, 3),
        "parts_ms": {name: round(us / len(middle) / 1000, 3) for name, us in parts.items()},
        "parts_share": {name: round(us / total, 4) for name, us in parts.items()},
        "collectives_a_step": statistics.median_low(len(s.of(*COLLECTIVES)) for s in steps),
        "from_backward_on": statistics.median_low(len(s.averaging()) for s in steps),
        "hidden_share": round(statistics.median(hidden), 4) if hidden else None,
        "threads": steps[(len(steps) - 1) // 2].rows(),
    }


def record(training: Training, steps: int) -> list[Step]:
    """What the profiler sees of so many steps, after two more; the last has no end."""
    mark, original = record_function(FORWARD), torch.Tensor.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        with record_function(BACKWARD):
            original(*args, **kwargs)

    training.parallel.register_forward_pre_hook(lambda *_: mark.__enter__() and None)
    training.parallel.register_forward_hook(lambda *_: mark.__exit__(None, None, None))
    # Without this, replicas' threads stay unseen (pytorch issue 64799).
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=every)
    with mock.patch.object(torch.Tensor, "backward", backward), profiler:
        training(steps + 2)
    events = sorted(profiler.events(), key=lambda e: e.time_range.start)
    calls = [(e.time_range.start, e.thread) for e in events if e.name.startswith(LOADING)]
    found = []
    for (low, thread), (high, _) in list(pairwise(calls))[1:]:
        inside = [
            Event(e.name, round(e.time_range.start - low), round(e.time_range.end - low), e.thread)
            for e in events
            if low <= e.time_range.start < high
        ]
        found.append(Step(inside, round(high - low), thread))
    return found


def on_ranks(names: list[str], steps: int, model: str, device: str) -> Results:
    """What each rank does for each stage; nothing, if the stage has one process."""
    torch.set_default_device("cpu")  # data sets are read there
    found = {}
    for name in names:
        dist.barrier()  # every rank must reach this line
        if Variant(name).alone and dist.get_rank() > 0:
            continue
        training = Training(Variant(name), model, BATCH, device)
        training(2 + steps)
        alone = training.recorder.seconds[2:]  # without the profiler, which costs time itself
        unprofiled = {"step_ms_unprofiled": round(statistics.median(alone) * 1000, 3)}
        found[name] = unprofiled | summarize_steps(record(training, steps))
    return found


def measure_timeline(effort: Effort, names: Iterable[str] = tuple(STAGES)) -> Results:
    """Of rank 0, the parts of a step of each stage, and one step's timeline."""
    steps, model = min(15, 2 + effort.rounds), "net-bn" if effort.quick else "resnet18"
    # quiet: on a machine without GPUs, the profiler complains that there are none
    how: dict[str, Any] = {"device": effort.device, "quiet": True}
    first, *_ = start(RANKS, on_ranks, list(names), steps, model, effort.device, **how)
    about = {"world_size": RANKS, "threads_a_rank": 1, "steps": steps}
    sizes = {"dataset": "digits", "model": model, "global_batch": BATCH, "ranks": RANKS}
    return {"provenance": about, **sizes, "device": effort.device, "stages": first}


def draw_step(results: Results, stage: str, axes: Axes) -> None:
    """One step of a stage: a row for each thread of rank 0, time to the right."""
    found = results["stages"][stage]
    for place, blocks in enumerate(found["threads"].values()):
        for what, low, high in blocks:
            colour, hatch = LOOKS[what]
            wide = high - low > found["step_ms"] / 50  # in a narrow one, a hatch is a smear
            look: dict[str, Any] = {"facecolor": colour, "hatch": hatch if wide else ""}
            axes.broken_barh([(low, high - low)], (place - 0.35, 0.7), ec="white", lw=0, **look)
    axes.set_yticks(range(len(found["threads"])), list(found["threads"]), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0)
    axes.set(xlabel="ms from the start of a step")
    title = f"{STAGES[stage]}: {results['model']}, rank 0 of {results['ranks']}"
    axes.set_title(title if stage > "02" else title.partition(",")[0], fontsize=10)


def draw_parts(results: Results, axes: Axes) -> None:
    """The parts of a step of every stage, one bar each."""
    rows = results["stages"]
    starts = np.zeros(len(rows))
    for part in PARTS:
        widths = [row["parts_ms"][part] for row in rows.values()]
        colour, hatch = LOOKS[part]
        labels = [STAGES[name] for name in rows]
        axes.barh(labels, widths, left=starts, color=colour, hatch=hatch, edgecolor="white")
        starts += widths
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
    handles = patches({part: LOOKS[part] for part in PARTS})
    axes.legend(handles=handles, ncols=3, fontsize=8, **below)
    axes.invert_yaxis()
    axes.set(xlabel=f"ms of a step (the middle half of {results['provenance']['steps']} steps)")
    where = results["provenance"]["hardware"]
    axes.set_title(f"{results['model']}, global batch {BATCH}\n{where}", fontsize=10)
