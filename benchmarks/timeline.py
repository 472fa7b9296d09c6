"""Where the time of a step goes, and what happens at the same time, from torch.profiler.

    python benchmarks/timeline.py

Each stage trains with its own loop (stages.py); nothing in it is changed. The profiler tells every
operator of every thread, and the collectives on gloo's own threads. What it does not name is marked
from outside: the model's forward by hooks, backward by a wrapper around Tensor.backward. How the
parts of a step follow from it: spans.py.

The network is resnet18, so that the gradients, 45 MB, take a while to send: DDP puts them into
three buckets, of 1, 25 and again 25 MiB at most. Those of net-bn fit into one: nothing overlaps.
"""

import os
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile, record_function

from common.options import Parser, UsageError, usage_errors_exit

from spans import BACKWARD, FORWARD, OTHER, PARTS, WAITING, Event, steps_of, summarize_steps
from stages import Training, Variant
from timing import ROOT, add_device, chapter, provenance, require_device, save

RANKS, MODEL, BATCH = 2, "resnet18", 64  # BATCH: the global one
STEPS, BRIEF_STEPS, MOST_STEPS = 15, 7, 20  # an epoch has 23
STAGES = {
    "01": "01 one process",
    "02": "02 DataParallel",
    "03": "03 by hand",
    "04": "04 DDP",
    "05": "05 DDP, SyncBN",
}
start = chapter("03", "ranks").start


# --- Measuring


@contextmanager
def marks(model: torch.nn.Module) -> Iterator[None]:
    """Name the model's forward, and backward, in what the profiler sees."""
    open_marks: list[record_function] = []

    def begin(*_: object) -> None:
        open_marks.append(record_function(FORWARD))
        open_marks[-1].__enter__()

    def end(*_: object) -> None:
        open_marks.pop().__exit__(None, None, None)

    original = torch.Tensor.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        with record_function(BACKWARD):
            original(*args, **kwargs)

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        with mock.patch.object(torch.Tensor, "backward", backward):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def record(training: Training, steps: int) -> list[Event]:
    """Train for so many steps under the profiler; what it saw of all threads."""
    # Without this, replicas' threads stay unseen (pytorch issue 64799).
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [ProfilerActivity.CPU]
    with (
        marks(training.parallel),
        profile(activities=kinds, experimental_config=every) as profiler,
    ):
        training(steps)
    return [
        Event(e.name, e.time_range.start / 1000, e.time_range.end / 1000, e.thread)
        for e in profiler.events()
    ]


def profile_stage(stage: str, steps: int, flags: list[str]) -> dict | None:
    """What each rank does for a stage; None from one that has nothing to do."""
    variant = Variant(stage)
    if variant.alone and dist.get_rank() > 0:
        return None
    training = Training(variant, *flags)
    training(2 + steps)
    alone = training.recorder.seconds[2:]  # without the profiler, which costs time itself
    found = summarize_steps(steps_of(record(training, steps + 2))[1:])
    return {"step_ms_unprofiled": round(statistics.median(alone) * 1000, 3), **found}


def measure_on_ranks(names: list[str], steps: int, flags: list[str]) -> dict[str, Any]:
    torch.set_default_device("cpu")  # data sets are read there
    found = {}
    for name in names:
        dist.barrier()  # every rank must reach this line
        found[name] = profile_stage(name, steps, flags)
    return found


def measure(
    names: Iterable[str] = tuple(STAGES), steps: int = STEPS, device: str = "cpu"
) -> dict[str, Any]:
    """Profile each stage on 2 ranks; of rank 0, the parts of a step and one step's timeline.

    names: of STAGES. steps: of each, all within one epoch. UsageError if either is not so.
    """
    names = list(names)
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"{steps} steps to profile: expected 1 to {MOST_STEPS}, try {STEPS}")
    if not names or not set(names) <= set(STAGES):
        raise UsageError(f"stages {','.join(names)}: expected some of {','.join(STAGES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks' replica threads of 02 read it
    flags = [f"--model={MODEL}", f"--batch-size={BATCH}", f"--data-dir={ROOT / 'data'}"]
    flags += [f"--device={device}"]
    where = provenance(device, world_size=RANKS, threads_a_rank=1, steps=steps)
    arguments = names, steps, flags
    # quiet: on a machine without GPUs, the profiler complains that there are none
    first, *_ = start(RANKS, measure_on_ranks, *arguments, device=device, quiet=True)
    sizes = {"dataset": "digits", "model": MODEL, "global_batch": BATCH, "ranks": RANKS}
    return {"provenance": where, **sizes, "device": device, "stages": first}


# --- Showing

# Okabe and Ito's colours, one a part; and hatches, for those who cannot tell these apart.
LOOKS = {
    "data": ("#F0E442", ""),
    "forward": ("#56B4E9", ""),
    "backward": ("#0072B2", "//"),
    WAITING: ("#D55E00", "xx"),
    "optimiser": ("#009E73", "\\\\"),
    OTHER: ("#CCCCCC", ""),
    "collective": ("#CC79A7", ".."),
}


def patches(names: Iterable[str]) -> list[Patch]:
    """What a legend shows."""
    looks = ((name, *LOOKS[name]) for name in names)
    return [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, c, h in looks]


def draw_timeline(results: dict[str, Any], stage: str, axes: Axes) -> None:
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


def draw_parts(results: dict[str, Any], axes: Axes) -> None:
    """The parts of a step of every stage, one bar each."""
    names = list(results["stages"])
    starts = [0.0] * len(names)
    for part in PARTS:
        widths = [results["stages"][name]["parts_ms"][part] for name in names]
        colour, hatch = LOOKS[part]
        labels = [STAGES[name] for name in names]
        axes.barh(labels, widths, left=starts, color=colour, hatch=hatch, edgecolor="white")
        starts = [low + width for low, width in zip(starts, widths, strict=True)]
    below = (0.5, -0.18)
    axes.legend(
        handles=patches(PARTS), ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=below
    )
    axes.invert_yaxis()
    axes.set(xlabel=f"ms of a step (the middle half of {results['provenance']['steps']} steps)")
    axes.set_title(
        f"{results['model']}, global batch {results['global_batch']}\n"
        f"{results['provenance']['hardware']}",
        fontsize=10,
    )


def report(results: dict[str, Any]) -> str:
    """The parts of each stage's step as text."""
    rows = []
    for name, found in results["stages"].items():
        parts = [f"{found['parts_ms'][part]:.1f}" for part in PARTS]
        hidden = "" if found["hidden_share"] is None else f"{found['hidden_share']:.0%}"
        step = f"{found['step_ms']:.1f}", f"{found['step_ms_unprofiled']:.1f}"
        rows.append((STAGES[name], *step, *parts, found["from_backward_on"], hidden))
    heads = ("ms", "step", "unprofiled", *PARTS, "collectives from backward on", "hidden")
    return tabulate(rows, heads, disable_numparse=True, maxheadercolwidths=12)


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--brief", action="store_true", help=f"{BRIEF_STEPS} steps of each instead of {STEPS}")
    add("--stages", default=",".join(STAGES), help="which to profile, as 03,04")
    add("--out", type=Path, metavar="FILE", help="write what was measured there, as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw it there, as .png")
    add_device(parser, "all ranks share the GPUs, by way of gloo; times are the program's")
    args = parser.parse_args()
    require_device(args.device)
    steps = BRIEF_STEPS if args.brief else STEPS
    results = measure(args.stages.split(","), steps, args.device)
    print(report(results))
    if args.out:
        save(args.out, results)
    if args.picture:
        count = len(results["stages"])
        figure, axes = plt.subplots(
            count, squeeze=False, figsize=(9, 1 + 1.7 * count), layout="constrained"
        )
        for each, name in zip(axes.flat, results["stages"], strict=True):
            draw_timeline(results, name, each)
        figure.legend(handles=patches(LOOKS), ncols=7, loc="outside lower center", fontsize=8)
        figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
