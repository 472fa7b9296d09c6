"""What every notebook imports first: where the repository is, and how its pictures look.

It changes to the root of the repository, so that every command of a README works in a cell, and
keeps each process to one thread: OMP_NUM_THREADS counts only before torch is imported.
"""

import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))

import matplotlib.pyplot as plt
import torch
from cycler import cycler
from matplotlib_inline.backend_inline import set_matplotlib_formats

from benchmarks.result_files import RESULTS, Results
from local_ranks.chapters import ROOT
from plots import COLORS

__all__ = ["COLORS", "ROOT", "check", "committed"]

os.chdir(ROOT)
torch.set_num_threads(1)
plt.rcParams["axes.prop_cycle"] = cycler(color=COLORS)
plt.rcParams["axes.spines.top"] = plt.rcParams["axes.spines.right"] = False
plt.rcParams["figure.constrained_layout.use"] = True
plt.rcParams["figure.dpi"] = 150  # with WIDTH, a phone of 368 pixels shows it at half its size
plt.rcParams["font.size"] = plt.rcParams["figure.titlesize"] = 12
set_matplotlib_formats("png")


def committed(section: str) -> dict[str, Results]:
    """This section of the results of `make bench` on every machine, by its hardware.

    The suite sets SHOWN_MACHINE, so that its notebooks do not show what a reader has measured.
    """
    shown = os.environ.get("SHOWN_MACHINE", "machines/*")
    machines = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{shown}.json"))]
    return {
        results["provenance"]["hardware"]: results[section]
        for results in machines
        if section in results
    }


def check(
    answer: object,
    right: float | str | None,
    within: float = 0.05,
    because: str = "",
    hint: str = "",
) -> None:
    """Say whether an answer is right; a number may be off by that share of the right one.

    right: None if a measurement was too noisy to tell.
    because: what to add to the verdict, once there is an answer.
    hint: what to add to it if it is wrong.
    """
    if answer is None:
        print("No answer yet: put it into the cell above, run that cell, then this one.")
    elif right is None:
        print(f"The machine was too busy to tell: run this cell again. {because}".rstrip())
    elif isinstance(right, str):
        verdict = "Right." if answer == right else f"Not yet: {answer!r} is not it. {hint}".rstrip()
        print(f"{verdict} {because}".rstrip())
    elif isinstance(answer, bool) or not isinstance(answer, (int, float)):
        print(f"Not yet: expected a number, got {answer!r}.")
    elif abs(answer - right) <= within * abs(right):
        print(f"Right: {right:,.4g}. {because}".rstrip())
    else:
        size = "large" if answer > right else "small"
        print(f"Not yet: {answer:,.4g} is too {size}. {hint}".rstrip())
