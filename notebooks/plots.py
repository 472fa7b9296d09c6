"""What the plots of the notebooks share: colors, hatches, bars of speeds and of bytes, legends."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.result_files import MIB, Results

# Okabe and Ito: distinct for the color-blind, too. https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, BLACK, YELLOW = "#56B4E9", "#CC79A7", "#000000", "#F0E442"
COLORS = [BLUE, ORANGE, GREEN, RED, SKY, PINK, BLACK, YELLOW]
GRAY = "#999999"
WIDTH = 5.2  # inches: scaled to the 368 pixels of a phone, its letters can still be read
VARIANT_COLORS = {  # the same in every picture; the keys are those of variants.py
    "01": BLACK,
    "01-cores": GRAY,
    "ceiling": "#CCCCCC",
    "02": ORANGE,
    "03": SKY,
    "04": GREEN,
    "05": RED,
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


def draw_speeds(results: Results, keys: Sequence[str]) -> None:
    """Draw how many times as fast as stage 01 each is, and its share of the ceiling."""
    rows = {key: results["variants"][key] for key in keys if key in results["variants"]}
    longest = max(1 / row["ratio_interval"][0] for row in rows.values())
    axis = plt.subplots(figsize=(WIDTH, 5.6))[1]
    for place, (key, row) in enumerate(rows.items()):
        low, high = row["ratio_interval"]  # of times, not of speeds
        speed = 1 / row["ratio"]
        axis.barh(place, speed, 0.5, color=VARIANT_COLORS[key])
        axis.plot([1 / high, 1 / low], [place, place], color=GRAY, linewidth=5)
        axis.plot([1 / high, 1 / low], [place, place], color="white", linewidth=1.5)
        share = f" · {row['share']:.0%}" if "share" in row else ""
        axis.text(1 / low + 0.025 * longest, place, f"{speed:.2f}{share}", va="center", bbox=BLANK)
        name_above(axis, row["label"], place - 0.29)
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="times the speed of 01 · share of the ceiling", xlim=(0, 1.45 * longest))
    title = "{model}, {cores} cores, {ranks} ranks, global batch {global_batch}"
    title_above(axis, title.format_map(results))
    without_places(axis)
    plt.show()


def draw_bytes(
    title: str,
    groups: Mapping[str, Sequence[Mapping[str, int]]],
    looks: Mapping[str, Look] = HELD,
    texts: Sequence[str] = (),
) -> None:
    """Draw a bar for each process of each group; texts: beside the bars, else their MiB."""
    bars = [(name, held) for name, processes in groups.items() for held in processes]
    axis = plt.subplots(figsize=(WIDTH, 2 + 0.3 * (len(bars) + len(groups))))[1]
    place, names = 0.0, set[str]()
    for number, (name, held) in enumerate(bars):
        place += 1 if name in names else 2
        if name not in names:
            name_above(axis, name, place - 0.5)
        names.add(name)
        left = 0.0
        for kind, (color, hatch) in looks.items():
            look: Any = {"facecolor": color, "hatch": hatch, "edgecolor": "white"}
            axis.barh(place, held.get(kind, 0) / MIB, 0.9, left, **look)
            left += held.get(kind, 0) / MIB
        text = texts[number] if texts else f"{left:.{int(left < 10)}f}"
        axis.text(left, place, f" {text}", va="center")
    axis.set(xlabel="MiB", xmargin=0.2, ylim=(0.7, place + 0.7))
    title_above(axis, title)
    without_places(axis)
    patches = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=kind)
        for kind, (color, hatch) in looks.items()
        if any(held.get(kind, 0) > 0.005 * MIB * left for _, held in bars)
    ]
    legend_below(axis, handles=patches, ncols=3)
    plt.show()


def name_above(axis: Axes, name: str, place: float) -> None:
    """Write the name of a bar above it, where it takes no width from the bars."""
    blend = axis.get_yaxis_transform()
    axis.text(0.005, place, name, transform=blend, va="bottom", fontsize=11, bbox=BLANK)


def without_places(axis: Axes) -> None:
    """The first bar is above, and the places of bars are no numbers to read."""
    axis.invert_yaxis()
    axis.set_yticks([])


def title_above(axis: Axes, title: str) -> None:
    axis.figure.suptitle(title, x=0.01, ha="left")


def legend_below(axis: Axes, **options: Any) -> None:
    short = {"columnspacing": 1.0, "handlelength": 1.5, "handletextpad": 0.5}
    axis.figure.legend(loc="outside lower center", fontsize=11, **short, **options)
