"""Do the stages compute the same? Their losses, and one plain process that replays their batches.

    python benchmarks/same_result.py

The replay is the oracle of the tests (tests/oracle.py): it knows no ranks, is told which samples
each step sees and which of them BatchNorm normalizes together, and trains in float64. The recipes
say so: all of the global batch together (01, SyncBN), its consecutive pieces (02), every second
sample (04, as DistributedSampler deals them), or equal pieces of fixed shards (03).
"""

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import cycle
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from tabulate import tabulate

from common.options import Parser

from timing import ROOT

Losses = list[float]  # of every step, the mean over the global batch
Line = tuple[str, ...]  # a file of a stage, a line of it; or text of it, and what stands there now

RUNS: dict[str, tuple[str, tuple[str, ...]]] = {  # a stage and its flags; 2 ranks or replicas
    "01 one process": ("01", ()),
    "02 DataParallel": ("02", ("--replicas=2",)),
    "03 by hand": ("03", ()),
    "04 DDP": ("04", ()),
    "05 DDP, SyncBN": ("05", ()),
    "05 in bf16": ("05", ("--amp=bf16",)),
}
STAGES = tuple(RUNS)[:5]  # in the precision that the run asks for
RECIPES = ("whole_batches", "chunks", "strides", "fixed_shards")
ALL_REDUCE = ("train.py", "average_gradients(model)")  # of stage 03: what its ranks exchange
NO_DROPOUT = ("train.py", "model.train()", "model.eval()")  # nothing else in `net` depends on it
SETTINGS: dict[str, Any] = {"batch": 120, "epochs": 2, "seed": 7, "lr": 0.02, "momentum": 0.9}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))


def of_the_tests(name: str) -> ModuleType:
    """A file of tests/ as a module: the proofs' own tools."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    return importlib.import_module(name)


def train(
    stage: str,
    *flags: str,
    model: str = "net-bn",
    dtype: str = "float32",
    without: tuple[Line, ...] = (),
) -> Any:
    """Run a stage's own train.py on the digits; 03 to 05 on two ranks of one thread.

    without: lines of the stage that are left out, or replaced. Returns `losses`, a tensor with one
    for each step, and `states`, the last weights of every rank.
    """
    settings = {**SETTINGS, "batch-size": SETTINGS["batch"], "model": model}
    del settings["batch"]
    common = [f"--{name}={value}" for name, value in settings.items()]
    ranks = 2 if stage >= "03" else 1
    run = of_the_tests("support").train
    return run(stage, ranks, *common, *flags, dtype=DTYPES[dtype], without=without)


def train_all(names: Sequence[str] = tuple(RUNS), **how: Any) -> dict[str, Any]:
    """These of RUNS, each trained as `train` tells."""
    return {name: train(RUNS[name][0], *RUNS[name][1], **how) for name in names}


def losses_of(runs: Mapping[str, Any]) -> dict[str, Losses]:
    return {name: run.losses.tolist() for name, run in runs.items()}


@cache
def replay(recipe: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses and last weights of one process that follows the recipe, in float64."""
    oracle = of_the_tests("oracle")
    steps = oracle.whole_batches if recipe == "whole_batches" else getattr(oracle, recipe)(2)
    return oracle.replay(steps, **SETTINGS)


def farthest(run: Any, replayed: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> float:
    """The largest difference of any loss, weight or running statistic of rank 0."""
    losses, state = replayed
    apart = [(run.states[0][name] - value).abs().max().item() for name, value in state.items()]
    return max((run.losses - losses).abs().max().item(), *apart)


def matrix(stages: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Of each float64 run, how far it is from the replay of each recipe."""
    replays = {recipe: replay(recipe) for recipe in RECIPES}
    return {
        name: {recipe: farthest(run, found) for recipe, found in replays.items()}
        for name, run in stages.items()
    }


def nearest(distances: Mapping[str, float]) -> str:
    """The recipe that a run follows; `none` if no replay comes as near as rounding."""
    recipe = min(distances, key=distances.__getitem__)
    return recipe if distances[recipe] < 1e-10 else "none"


def ranks_apart(run: Any) -> float:
    """The largest difference of a weight between the ranks of a run."""
    first, *others = run.states
    learnt = [name for name in first if name.endswith(("weight", "bias"))]
    return max(
        (first[name] - other[name]).abs().max().item() for other in others for name in learnt
    )


def gaps(losses: Sequence[float], others: Sequence[float]) -> Losses:
    """How far apart two runs are, step by step."""
    return [abs(a - b) for a, b in zip(losses, others, strict=True)]


def draw_losses(axis: Axes, losses: Mapping[str, Losses]) -> None:
    """The loss curves: the first wide and pale, so that what lies on it can be seen."""
    for (name, values), (marker, line) in zip(losses.items(), cycle(STYLES)):
        wide = name == next(iter(losses))
        width, alpha = (7, 0.3) if wide else (1.5, 1)
        mark: dict[str, Any] = {} if wide else {"marker": marker, "markevery": 4, "markersize": 5}
        steps = range(1, len(values) + 1)
        axis.plot(steps, values, line, linewidth=width, alpha=alpha, label=name, **mark)
    axis.set(xlabel="optimizer step", ylabel="loss of the global batch")
    axis.legend(fontsize="small")


def draw_gaps(axis: Axes, found: Mapping[str, Losses], skip: int = 0) -> None:
    """Distances, step by step, on a log axis; those that are 0 are not drawn.

    skip: colours and markers of this picture that others have already.
    """
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for place, (name, values) in enumerate(found.items(), skip):
        marker, line = STYLES[place % len(STYLES)]
        apart = [gap or math.nan for gap in values]
        color = colours[place % len(colours)]
        steps = range(1, len(apart) + 1)
        axis.plot(steps, apart, line, marker=marker, markersize=4, color=color, label=name)
    axis.set(xlabel="optimizer step", ylabel="|difference| (0 is not drawn)", yscale="log")
    axis.legend(fontsize="small")


def draw_matrix(axis: Axes, found: Mapping[str, Mapping[str, float]]) -> None:
    """A cell for each run and recipe: how far apart they are, and in words where they agree."""
    logs = [[math.log10(max(value, 1e-17)) for value in row.values()] for row in found.values()]
    axis.imshow(logs, cmap="cividis", vmin=-17, vmax=0, aspect="auto")
    axis.set_xticks(range(len(RECIPES)), RECIPES)
    axis.set_yticks(range(len(found)), list(found))
    for y, row in enumerate(found.values()):
        for x, value in enumerate(row.values()):
            same = value < 1e-10
            text = f"same\n{value:.0e}" if same else f"{value:.1g}"
            axis.text(x, y, text, ha="center", va="center", color="white" if same else "black")
    axis.spines[:].set_visible(False)
    axis.set(xlabel="what the replay does with each global batch")


def main() -> None:
    found = matrix(train_all(STAGES, dtype="float64"))
    broken = train("03", dtype="float64", without=(ALL_REDUCE,))
    found |= matrix({"03 without its all-reduce": broken})
    cells = [
        (name, *(f"{value:.0e}" for value in row.values()), nearest(row))
        for name, row in found.items()
    ]
    print(tabulate(cells, ("", *RECIPES, "repeats"), disable_numparse=True))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    torch.set_num_threads(1)
    main()
