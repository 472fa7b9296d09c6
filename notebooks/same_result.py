"""Do the stages compute the same? For notebook 03: their losses, and a replay of their batches.

The replay is local_ranks/oracle.py: one plain process in float64. Its recipe is what BatchNorm
normalizes together: the global batch (01, SyncBN), its pieces (02), or strides of it (03, 04).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes

from benchmarks.variants import STAGES, VARIANTS
from local_ranks import oracle, train_stage
from plots import VARIANT_COLORS

Losses = list[float]  # of every step


class Run(NamedTuple):
    key: str  # of VARIANTS
    ranks: int
    flags: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return VARIANTS[self.key].label

    @property
    def color(self) -> str:
        return VARIANT_COLORS[self.key]


RUNS = {
    run.label: run
    for run in (
        Run("01", 1),
        Run("02", 1, ("--replicas=2",)),
        Run("03", 2),
        Run("04", 2),
        Run("05", 2),
        Run("05-local-bn", 2, ("--no-sync-bn",)),
        Run("05-bf16", 2, ("--amp=bf16",)),
    )
}
STAGE_LABELS = tuple(VARIANTS[key].label for key in STAGES)
LABELS_WITH_BF16 = (*STAGE_LABELS, VARIANTS["05-bf16"].label)
RECIPES = ("whole_batches", "chunks", "strides")
ALL_REDUCE = ("train.py", "average_gradients(model)")  # of stage 03: what its ranks exchange
NO_DROPOUT = ("train.py", ".train()", ".eval()")  # nothing else in `net` depends on it
SETTINGS: dict[str, Any] = {"batch": 120, "epochs": 2, "seed": 7, "lr": 0.02, "momentum": 0.9}
STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))


def train(name: str, dtype: str = "float32", model: str = "net-bn", changes: tuple = ()) -> Any:
    """Do one of RUNS by the stage's own train.py, on the digits: its `losses` and `states`.

    changes: lines of the stage that are left out, or replaced by others, each with its file.
    """
    settings = {"batch-size" if name == "batch" else name: SETTINGS[name] for name in SETTINGS}
    words = [f"--{flag}={value}" for flag, value in settings.items()] + [f"--model={model}"]
    run, precision = RUNS[name], getattr(torch, dtype)
    stage, words = VARIANTS[run.key].stage, [*words, *run.flags]
    return train_stage.train(stage, run.ranks, *words, dtype=precision, changes=changes)


def train_all(names: Iterable[str] = LABELS_WITH_BF16, **options: Any) -> dict[str, Any]:
    return {name: train(name, **options) for name in names}


def losses_of(runs: Mapping[str, Any]) -> dict[str, Losses]:
    return {name: run.losses.tolist() for name, run in runs.items()}


@cache
def replay(recipe: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses and last weights of one process that follows the recipe, in float64."""
    steps = getattr(oracle, recipe)
    training = oracle.Training(**SETTINGS)
    return oracle.replay(steps if recipe == "whole_batches" else steps(2), training)


def matrix(runs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """How far each float64 run is from each replay: its losses, and rank 0's last state."""
    distances: dict[str, dict[str, float]] = {name: {} for name in runs}
    for recipe in RECIPES:
        losses, state = replay(recipe)
        for name, run in runs.items():
            pairs = [(run.losses, losses), *((run.states[0][key], state[key]) for key in state)]
            distances[name][recipe] = max((ours - its).abs().max().item() for ours, its in pairs)
    return distances


def nearest(distances: Mapping[str, float]) -> str:
    """The recipe that a run follows; `none` if no replay comes as near as rounding."""
    recipe = min(distances, key=distances.__getitem__)
    return recipe if distances[recipe] < 1e-10 else "none"


def ranks_apart(run: Any) -> float:
    first, second = run.states
    names = [name for name in first if name.endswith(("weight", "bias"))]
    return max((first[name] - second[name]).abs().max().item() for name in names)


def gaps(losses: Sequence[float], others: Sequence[float]) -> Losses:
    return [abs(a - b) for a, b in zip(losses, others, strict=True)]


def draw_losses(axis: Axes, losses: Mapping[str, Losses]) -> None:
    """The loss curves: the first wide and pale, so that what lies on it can be seen."""
    (name, values), *others = losses.items()
    style: Any = {"linewidth": 7, "alpha": 0.3, "color": RUNS[name].color, "label": name}
    axis.plot(range(1, len(values) + 1), values, **style)
    draw_gaps(axis, dict(others), skip=1)
    axis.set(ylabel="loss of the global batch", yscale="linear")


def draw_gaps(axis: Axes, gaps_of_runs: Mapping[str, Losses], skip: int = 0) -> None:
    """Distances on a log axis; 0 is not drawn. skip: markers that others have."""
    for place, (name, values) in enumerate(gaps_of_runs.items(), skip):
        (marker, line), steps = STYLES[place], range(1, len(values) + 1)
        color = RUNS[name].color if name in RUNS else f"C{place}"
        style: Any = {"marker": marker, "markersize": 4, "color": color, "label": name}
        axis.plot(steps, [value or math.nan for value in values], line, **style)
    axis.set(xlabel="optimizer step", ylabel="|difference| (0 is not drawn)", yscale="log")
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))  # beside the lines


def draw_matrix(axis: Axes, distances: Mapping[str, Mapping[str, float]]) -> None:
    logs = [[math.log10(max(value, 1e-17)) for value in row.values()] for row in distances.values()]
    axis.imshow(logs, cmap="cividis", vmin=-17, vmax=0, aspect="auto")
    axis.set_xticks(range(len(RECIPES)), RECIPES)
    axis.set_yticks(range(len(distances)), list(distances))
    for y, row in enumerate(distances.values()):
        for x, value in enumerate(row.values()):
            same = value < 1e-10
            text, color = (f"same\n{value:.0e}", "white") if same else (f"{value:.1g}", "black")
            axis.text(x, y, text, ha="center", va="center", color=color)
    axis.spines[:].set_visible(False)
    axis.set(xlabel="what the replay does with each global batch")
