"""Train stages for notebook 03, on the digits, and draw how far their losses and weights agree."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from benchmarks.variants import VARIANTS
from common.data import load_dataset
from common.models import build_model
from local_ranks import train_stage
from plots import VARIANT_COLORS, WIDTH, legend_below, title_above

SETTINGS = [
    "--model=net-bn",
    "--batch-size=120",
    "--epochs=2",
    "--seed=7",
    "--lr=0.02",
    "--momentum=0.9",
]
SAME = 1e-10  # nearer than any other computation, farther than rounding in float64
FLOOR = 1e-17  # where a logarithmic axis shows 0
STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"))


class StageRun(NamedTuple):
    key: str  # of VARIANTS
    ranks: int
    flags: tuple[str, ...] = ()


RUNS = {
    "01 one process": StageRun("01", 1),
    "02 DataParallel": StageRun("02", 1, ("--replicas=2",)),
    "03 by hand": StageRun("03", 2),
    "04 DDP": StageRun("04", 2),
    "05 DDP, SyncBN": StageRun("05", 2),
    "05, no SyncBN": StageRun("05", 2, ("--no-sync-bn",)),
    "05 in bf16": StageRun("05", 2, ("--amp=bf16",)),
}


def train(name: str, dtype: torch.dtype = torch.float64, leave_out: str = "") -> Any:
    """Do one of RUNS by the stage's own train.py: its `losses`, and the `states` of its ranks.

    leave_out: a line of train.py that is left out.
    """
    run = RUNS[name]
    changes = (("train.py", leave_out),) if leave_out else ()
    flags, stage = (*SETTINGS, *run.flags), VARIANTS[run.key].stage
    return train_stage.train(stage, run.ranks, *flags, dtype=dtype, changes=changes)


def digits() -> tuple[Tensor, Tensor]:
    """Return what every stage trains on, in float64: images (N, 1, 28, 28) and labels (N,)."""
    with train_stage.default_dtype(torch.float64):
        train_set, _ = load_dataset(train_stage.options())
        return train_set.__getitems__([*range(len(train_set))])


def new_net() -> nn.Module:
    """Make the network with which every stage begins: the same seed, so the same weights."""
    with train_stage.default_dtype(torch.float64):
        train_set, _ = load_dataset(train_stage.options())
        torch.manual_seed(7)
        return build_model("net-bn", train_set)


def repeats(distances: Mapping[str, float]) -> str:
    """Name the replay that a run repeats, or `nothing`."""
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] < SAME else "nothing"


def draw_lines(title: str, lines: Mapping[str, Tensor], ylabel: str, linked: bool = True) -> Axes:
    """Draw a line for each run; the first is wide and pale, so that those upon it are seen."""
    axis = plt.subplots(figsize=(WIDTH, 4.6))[1]
    for number, (name, values) in enumerate(lines.items()):
        marker, style = STYLES[number % len(STYLES)]
        color = VARIANT_COLORS[RUNS[name].key] if name in RUNS else f"C{number}"
        look: Any = {"marker": marker, "linestyle": style if linked else "", "markersize": 5}
        if number == 0 and linked:
            look = {"linewidth": 7, "alpha": 0.3}
        axis.plot(range(1, len(values) + 1), values, color=color, label=name, **look)
    axis.set(xlabel="optimizer step", ylabel=ylabel)
    title_above(axis, title)
    legend_below(axis, ncols=2)
    return axis


def draw_losses(title: str, runs: Mapping[str, Any]) -> None:
    draw_lines(title, {name: run.losses for name, run in runs.items()}, "loss of the global batch")
    plt.show()


def draw_distances(title: str, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """Draw how far the losses of two runs are apart, step by step, for each pair."""
    lines = {name: (a.losses - b.losses).abs() for name, (a, b) in pairs.items()}
    seen = {name: line.clamp(min=FLOOR) for name, line in lines.items()}
    axis = draw_lines(title, seen, "|difference| of the losses", linked=False)
    powers = range(-15, 0, 3)
    axis.set_yscale("log")
    axis.minorticks_off()
    axis.set_yticks([FLOOR, *(10.0**n for n in powers)], ["0", *(f"$10^{{{n}}}$" for n in powers)])
    plt.show()


def draw_matrix(distances: Mapping[str, Mapping[str, float]]) -> None:
    rows = [[*row.values()] for row in distances.values()]
    axis = plt.subplots(figsize=(WIDTH, 1.1 + 0.45 * len(rows)))[1]
    logs = [[math.log10(max(value, FLOOR)) for value in row] for row in rows]
    axis.imshow(logs, cmap="cividis", vmin=-17, vmax=0, aspect="auto")
    axis.set_xticks(range(len(rows[0])), [*next(iter(distances.values()))])
    axis.set_yticks(range(len(rows)), [*distances])
    axis.tick_params(labelsize=11, length=0)
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            text, color = ("same", "white") if value < SAME else (f"{value:.1g}", "black")
            axis.text(x, y, text, ha="center", va="center", color=color)
    axis.spines[:].set_visible(False)
    title_above(axis, "Largest difference of stage and replay")
    plt.show()
