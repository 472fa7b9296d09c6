"""Do the stages compute the same? For notebook 03: their losses, and a replay of their batches.

The replay is tests/oracle.py: one plain process in float64. A recipe tells it which samples each
step sees and which of them BatchNorm normalizes together: all of the global batch (01, SyncBN), its
consecutive pieces (02), every second sample (04), or equal pieces of fixed shards (03).
"""

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from matplotlib.axes import Axes

oracle, support = (importlib.import_module(name) for name in ("oracle", "support"))  # of tests/

Losses = list[float]  # of every step, the mean over the global batch
Lines = tuple[tuple[str, ...], ...]  # a file of a stage, a line of it; or its text, and another

RUNS: dict[str, tuple[str, ...]] = {  # a stage and its flags; 2 ranks or replicas
    "01 one process": ("01",),
    "02 DataParallel": ("02", "--replicas=2"),
    "03 by hand": ("03",),
    "04 DDP": ("04",),
    "05 DDP, SyncBN": ("05",),
    "05 in bf16": ("05", "--amp=bf16"),
}
STAGES = tuple(RUNS)[:5]  # in the precision that the run asks for
RECIPES = ("whole_batches", "chunks", "strides", "fixed_shards")
ALL_REDUCE = ("train.py", "average_gradients(model)")  # of stage 03: what its ranks exchange
NO_DROPOUT = ("train.py", "model.train()", "model.eval()")  # nothing else in `net` depends on it
SETTINGS: dict[str, Any] = {"batch": 120, "epochs": 2, "seed": 7, "lr": 0.02, "momentum": 0.9}
STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))


def train(stage: str, *flags: str, dtype: str = "float32", without: Lines = (), **more: str) -> Any:
    """Run a stage's own train.py on the digits; 03 to 05 on two ranks of one thread.

    without: lines of the stage that are left out, or replaced; more: `model`. Returns `losses`, a
    tensor with one for each step, and `states`, the last weights of every rank.
    """
    settings = {"model": "net-bn", **SETTINGS, **more, "batch-size": SETTINGS["batch"]}
    common = [f"--{name}={value}" for name, value in settings.items() if name != "batch"]
    ranks, precision = 2 if stage >= "03" else 1, getattr(torch, dtype)
    return support.train(stage, ranks, *common, *flags, dtype=precision, without=without)


def train_all(names: Iterable[str] = tuple(RUNS), **how: Any) -> dict[str, Any]:
    return {name: train(*RUNS[name], **how) for name in names}


def losses_of(runs: Mapping[str, Any]) -> dict[str, Losses]:
    return {name: run.losses.tolist() for name, run in runs.items()}


@cache
def replay(recipe: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses and last weights of one process that follows the recipe, in float64."""
    steps = getattr(oracle, recipe)
    return oracle.replay(steps if recipe == "whole_batches" else steps(2), **SETTINGS)


def matrix(runs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """How far each float64 run is from each replay: its losses, and rank 0's last state."""
    found: dict[str, dict[str, float]] = {name: {} for name in runs}
    for recipe in RECIPES:
        losses, state = replay(recipe)
        for name, run in runs.items():
            pairs = [(run.losses, losses), *((run.states[0][key], state[key]) for key in state)]
            found[name][recipe] = max((ours - its).abs().max().item() for ours, its in pairs)
    return found


def nearest(distances: Mapping[str, float]) -> str:
    """The recipe that a run follows; `none` if no replay comes as near as rounding."""
    recipe = min(distances, key=distances.__getitem__)
    return recipe if distances[recipe] < 1e-10 else "none"


def ranks_apart(run: Any) -> float:
    first, *others = run.states
    names = [name for name in first if name.endswith(("weight", "bias"))]
    return max((first[n] - other[n]).abs().max().item() for other in others for n in names)


def gaps(losses: Sequence[float], others: Sequence[float]) -> Losses:
    """How far apart two runs are, step by step."""
    return [abs(a - b) for a, b in zip(losses, others, strict=True)]


def draw_lines(axis: Axes, found: Mapping[str, Losses], skip: int = 0) -> None:
    for place, (name, values) in enumerate(found.items(), skip):
        (marker, line), steps = STYLES[place], range(1, len(values) + 1)
        axis.plot(steps, values, line, marker=marker, markersize=4, color=f"C{place}", label=name)
    axis.set_xlabel("optimizer step")
    axis.legend(fontsize="small")


def draw_losses(axis: Axes, losses: Mapping[str, Losses]) -> None:
    """The loss curves: the first wide and pale, so that what lies on it can be seen."""
    (name, values), *others = losses.items()
    axis.plot(range(1, len(values) + 1), values, linewidth=7, alpha=0.3, label=name)
    draw_lines(axis, dict(others), skip=1)
    axis.set_ylabel("loss of the global batch")


def draw_gaps(axis: Axes, found: Mapping[str, Losses], skip: int = 0) -> None:
    """Distances on a log axis; 0 is not drawn. skip: colors and markers that others have."""
    apart = {name: [gap or math.nan for gap in values] for name, values in found.items()}
    draw_lines(axis, apart, skip)
    axis.set(ylabel="|difference| (0 is not drawn)", yscale="log")


def draw_matrix(axis: Axes, found: Mapping[str, Mapping[str, float]]) -> None:
    """A cell for each run and recipe: how far apart they are, and in words where they agree."""
    logs = [[math.log10(max(value, 1e-17)) for value in row.values()] for row in found.values()]
    axis.imshow(logs, cmap="cividis", vmin=-17, vmax=0, aspect="auto")
    axis.set_xticks(range(len(RECIPES)), RECIPES)
    axis.set_yticks(range(len(found)), list(found))
    for y, row in enumerate(found.values()):
        for x, value in enumerate(row.values()):
            text, color = f"{value:.1g}", "black"
            if value < 1e-10:
                text, color = f"same\n{value:.0e}", "white"
            axis.text(x, y, text, ha="center", va="center", color=color)
    axis.spines[:].set_visible(False)
    axis.set(xlabel="what the replay does with each global batch")
