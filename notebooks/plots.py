"""What the plots of the notebooks share: colors, hatches, bars with intervals and of bytes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.result_files import MIB

# Okabe and Ito: distinct for the color-blind, too. https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, BLACK, YELLOW = "#56B4E9", "#CC79A7", "#000000", "#F0E442"
COLORS = [BLUE, ORANGE, GREEN, RED, SKY, PINK, BLACK, YELLOW]
GRAY = "#999999"
VARIANT_COLORS = {  # the same in every picture; the keys are those of variants.py
    "01": BLACK,
    "01-cores": GRAY,
    "ceiling": "#CCCCCC",
    "02": ORANGE,
    "03": SKY,
    "04": GREEN,
    "04-shm": "#006048",  # darker
    "05": RED,
    "05-shm": "#8C3A00",
    "05-local-bn": YELLOW,
    "05-bf16": PINK,
}
HATCHES = ["", "//", "\\\\", "xx", "..", "++", "oo", "--"]  # distinct without colors

# Behind a text, so that no line strikes it out.
BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 1}
Look = tuple[str, str]  # color and hatch

# The hues of docs/pictures/svg.py where it draws the same kind, in shades of Okabe and Ito.
HELD: dict[str, Look] = {  # what a process holds, by kind
    "parameters": (GREEN, ""),
    "buffers": (BLACK, ""),
    "gradients": (BLUE, "//"),
    "buckets": (RED, "\\\\"),
    "optimizer": (GRAY, ".."),
    "batch": (YELLOW, ""),
    "activations": (SKY, "xx"),
    "outputs and loss": (PINK, ""),
}


def bars(
    axis: Axes,
    values: Mapping[str, float],
    looks: Iterable[Look],
    texts: Iterable[str],
    intervals: Iterable[tuple[float, float]],
) -> None:
    """Horizontal bars, the first on top, with a text each; intervals: how far below and above."""
    colors, hatches = zip(*looks, strict=True)
    style: Any = {"color": colors, "hatch": hatches, "edgecolor": "white", "ecolor": "black"}
    lengths = list(values.values())
    errors = np.transpose(list(intervals))  # (2, bars)
    axis.barh(list(values), lengths, xerr=errors, **style)
    ends = lengths + errors[1]
    for place, text in enumerate(texts):
        axis.text(ends[place] + 0.02 * max(ends), place, text, va="center", fontsize=8, bbox=BLANK)
    axis.set_xlim(0, 1.2 * max(ends))
    axis.invert_yaxis()


def stack(
    axis: Axes,
    groups: Mapping[str, Sequence[Mapping[str, int]]],
    looks: Mapping[str, Look],
    texts: Sequence[str] = (),
) -> None:
    """A stacked bar of bytes for each process of each group.

    texts: above each group; by default the heights of its bars, one below another, equal ones once.
    """
    place, middles = 0, []
    for group, processes in enumerate(groups.values()):
        heights: dict[str, float] = {}  # by the text that shows each
        for number, bytes_of in enumerate(processes):
            bottom = 0.0
            for kind, (color, hatch) in looks.items():
                height = bytes_of.get(kind, 0) / MIB
                look: Any = {"facecolor": color, "hatch": hatch, "edgecolor": "white"}
                axis.bar(place + number, height, 0.9, bottom, **look)
                bottom += height
            heights[f"{bottom:.{int(bottom < 10)}f}"] = bottom
        middles.append(place + (len(processes) - 1) / 2)
        text = texts[group] if texts else "\n".join(heights)
        top = max(heights.values())
        axis.text(middles[-1], top, text, ha="center", va="bottom", fontsize="small")
        place += len(processes) + 1
    axis.set_xticks(middles, list(groups))
    axis.set(ylabel="MiB held", ymargin=0.08)


def legend(axis: Axes, looks: Mapping[str, Look], **where: Any) -> None:
    """Draw the legend of a stack, whose lowest part is the lowest line."""
    patches = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=kind)
        for kind, (color, hatch) in looks.items()
    ]
    axis.legend(handles=patches[::-1], fontsize="small", **where)
