"""Where the time of a step goes, and what happens at the same time, from torch.profiler.

Each stage trains with its own loop (stages.py). The profiler records all operators of all threads;
forward and backward are marked from outside. Every microsecond of a step belongs to one of PARTS.
The network is resnet18. Its gradients need three buckets; with one bucket, nothing overlaps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, median_low
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from plots import BLUE, GRAY, GREEN, PINK, RED, SKY, YELLOW, Axes
from stages import Training, Variant, start
from timing import Effort, Results

RANKS, BATCH = 2, 64  # BATCH: the global one
NAMES = ("01 one process", "02 DataParallel", "03 by hand", "04 DDP", "05 DDP, SyncBN")
STAGES = {name[:2]: name for name in NAMES}
FORWARD, BACKWARD = "benchmark: forward", "benchmark: backward"  # our marks in the profile
COLLECTIVES, AUTOGRAD, LOADING = ("gloo:", "nccl:"), "autograd::engine", "enumerate(DataLoader)"
MARKS = {"data": LOADING, "forward": FORWARD, "backward": BACKWARD, "optimizer": "Optimizer."}
GAP = 100  # a shorter one between two operators, in us, is the program's own
WAITING = "waiting for others"
LOOKS = {"data": (YELLOW, ""), "forward": (SKY, ""), "backward": (BLUE, "//"), WAITING: (RED, "xx")}
LOOKS |= {"optimizer": (GREEN, "\\\\"), "other": (GRAY, ""), "collective": (PINK, "..")}
PARTS = tuple(LOOKS)[:-1]


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
        """The events with a name that starts with one of these; by default on any thread."""
        found = [e for e in self.events if e.name.startswith(names)]
        return [e for e in found if not threads or e.thread in threads]

    def cover(self, events: Iterable[Event]) -> np.ndarray:
        """For each microsecond of the step: whether any of them is under way."""
        found = np.zeros(self.length, bool)
        for event in events:
            found[event.start : event.end] = True
        return found

    def waiting(self) -> np.ndarray:
        """When no operator of the loop runs, and a collective is under way."""
        loop = {self.thread} | {e.thread for e in self.of(AUTOGRAD)}  # of a GPU, a second thread
        under_way, found = self.cover(self.of(*COLLECTIVES)), np.zeros(self.length, bool)
        for low, high in runs(~self.cover(self.of("aten::", threads=loop))):
            found[low:high] = high - low >= GAP and under_way[low:high].any()
        return found

    def parts(self) -> dict[str, np.ndarray]:
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
        return {
            row: [(what, a / 1000, b / 1000) for what, mask in each.items() for a, b in runs(mask)]
            for row, each in masks.items()
        }


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.pad(mask.astype(np.int8), 1)))
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


def summarize_steps(steps: list[Step]) -> Results:
    """The mean parts of the steps of middle length, half of all; the threads of the median one."""
    steps = sorted(steps, key=lambda step: step.length)
    middle = steps[len(steps) // 4 : -(len(steps) // 4) or None]
    parts = [step.parts() for step in middle]
    hidden = [share for share in (step.hidden_share() for step in steps) if share is not None]
    return {
        "steps": len(steps),
        "step_ms": round(fmean(step.length for step in middle) / 1000, 3),
        "parts_ms": {p: round(fmean(each[p].sum() for each in parts) / 1000, 3) for p in PARTS},
        "from_backward_on": median_low(len(step.averaging()) for step in steps),
        "hidden_share": round(median(hidden), 4) if hidden else None,
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
    # Without this, replicas' threads are not recorded (pytorch issue 64799).
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=every)
    with mock.patch.object(torch.Tensor, "backward", backward), profiler:
        training(steps + 2)
    spans = [(e.name, e.time_range.start, e.time_range.end, e.thread) for e in profiler.events()]
    spans.sort(key=lambda each: each[1])
    calls, found = [each[1::2] for each in spans if each[0].startswith(LOADING)], []
    for (low, thread), (high, _) in list(pairwise(calls))[1:]:
        inside = [(n, round(a - low), round(b - low), t) for n, a, b, t in spans if low <= a < high]
        found.append(Step([Event(*each) for each in inside], round(high - low), thread))
    return found


def on_ranks(names: list[str], steps: int, model: str, device: str) -> Results:
    torch.set_default_device("cpu")  # data sets are read there
    found = {}
    for name in names:
        dist.barrier()  # every rank must reach this line
        if not (Variant(name).alone and dist.get_rank() > 0):
            training = Training(Variant(name), model, BATCH, device)
            training(2 + steps)  # to warm up
            found[name] = summarize_steps(record(training, steps))
    return found


def measure_timeline(effort: Effort, names: Iterable[str] = tuple(STAGES)) -> Results:
    """Of rank 0, the parts of a step of each stage, and one step's timeline."""
    steps, model = min(15, 2 + effort.rounds), "net-bn" if effort.quick else "resnet18"
    what = list(names), steps, model, effort.device
    # quiet: on a machine without GPUs, the profiler complains that there are none
    first, *_ = start(RANKS, on_ranks, *what, device=effort.device, quiet=True)
    about = {"dataset": "digits", "model": model, "global_batch": BATCH, "ranks": RANKS}
    where = {"world_size": RANKS, "threads_a_rank": 1, "steps": steps}
    return {"provenance": where, **about, "device": effort.device, "stages": first}


def draw_step(results: Results, stage: str, axes: Axes) -> None:
    found = results["stages"][stage]
    for place, blocks in enumerate(found["threads"].values()):
        for what, low, high in blocks:
            color, hatch = LOOKS[what]
            if high - low < found["step_ms"] / 50:  # too narrow for a hatch
                hatch = ""
            axes.barh(place, high - low, 0.7, low, color=color, hatch=hatch, ec="white", lw=0)
    axes.set_yticks(range(len(found["threads"])), list(found["threads"]), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0)
    axes.set(xlabel="ms from the start of a step")
    rank = f", rank 0 of {results['ranks']}" if stage > "02" else ""
    axes.set_title(f"{STAGES[stage]}: {results['model']}{rank}", fontsize=10)


def draw_parts(results: Results, axes: Axes) -> None:
    rows = results["stages"]
    starts = np.zeros(len(rows))
    for part in PARTS:
        widths = [row["parts_ms"][part] for row in rows.values()]
        look: Any = dict(zip(("color", "hatch"), LOOKS[part], strict=True), edgecolor="white")
        axes.barh([STAGES[name] for name in rows], widths, left=starts, label=part, **look)
        starts += widths
    axes.legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    axes.invert_yaxis()
    axes.set(xlabel=f"ms of a step (the middle half of {results['provenance']['steps']} steps)")
    where = results["provenance"]["hardware"]
    axes.set_title(f"{results['model']}, global batch {BATCH}\n{where}", fontsize=10)
