"""What the pictures share: colors, hatches, bars with intervals, and a note of what each shows."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from timing import RESULTS, SAME, Results, load

# Okabe and Ito: distinct for the color-blind, too. https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, BLACK, YELLOW = "#56B4E9", "#CC79A7", "#000000", "#F0E442"
COLORS = [BLUE, ORANGE, GREEN, RED, SKY, PINK, BLACK, YELLOW]
GRAY = "#999999"
HATCHES = ["", "//", "\\\\", "xx", "..", "++", "oo", "--"]  # distinct without colors

Draw = Callable[[Results], Figure]  # what results look like
Look = tuple[str, str]  # color and hatch


def ends(rows: Iterable[Mapping[str, Any]]) -> Any:
    """How far the interval of each ratio reaches below and above it, in the form of matplotlib."""
    far = [[abs(end - row["ratio"]) for end in row["ratio_interval"]] for row in rows]
    return list(zip(*far, strict=True))


def bars(
    axis: Axes, names: Iterable[str], values: Any, looks: Any, texts: Any = (), xerr: Any = None
) -> None:
    """Horizontal bars, the first on top, with intervals (below, above) and a text each."""
    colors, hatches = zip(*looks, strict=True)
    style: Any = {"color": colors, "hatch": hatches, "edgecolor": "white", "ecolor": "black"}
    axis.barh(list(names), values, xerr=xerr, **style)
    far = np.add(values, xerr[1] if xerr else 0)
    for place, text in enumerate(texts):
        axis.text(far[place] + 0.02 * max(far), place, text, va="center", fontsize=8)
    axis.set_xlim(0, max(far) * (1.2 if texts else 1.05))
    axis.invert_yaxis()


def ratio_bars(axis: Axes, variants: Mapping[str, Any], looks: Any, texts: Any = ()) -> None:
    """Bars of the ratios of variants to their baseline, which is the line at 1."""
    rows = {name: row for name, row in variants.items() if name != SAME}
    bars(axis, rows, [row["ratio"] for row in rows.values()], looks, texts, ends(rows.values()))
    axis.axvline(1, color="black", linewidth=1)


def speed_bars(axis: Axes, variants: Mapping[str, Any], key: str, looks: Any, texts: Any) -> None:
    """Bars of the rate of each variant per second, with the interval of its ratio."""
    speeds, far = [row[key] for row in variants.values()], list[list[float]]()
    for row in variants.values():
        far.append([row[key] * abs(row["ratio"] / end - 1) for end in row["ratio_interval"][::-1]])
    bars(axis, variants, speeds, looks, texts, list(zip(*far, strict=True)))


def patches(looks: Mapping[str, Look]) -> list[Patch]:
    return [Patch(fc=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in looks.items()]


def draw_picture(name: str, draw: Draw) -> None:
    """Draw results/NAME.png from results/NAME.json, and keep a digest of its sources in it."""
    matplotlib.use("Agg")  # files, no windows
    figure = draw(load(name))
    note = {"made of": made_of(name, draw)}
    figure.savefig(RESULTS / f"{name}.png", dpi=110, metadata=note)


def made_of(name: str, draw: Draw) -> str:
    """A digest of what a picture shows, of the function that draws it, and of this file."""
    source = inspect.getsource(draw).encode() + Path(__file__).read_bytes()
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes() + source).hexdigest()
