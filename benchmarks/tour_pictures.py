"""The picture of the tour, made from tour.json: which stage repeats 01?"""

import hashlib
import inspect
import json
import statistics
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from plots import VARIANT_COLORS
from timing import Results
from tour_report import EQUAL

PICTURE = "repeats_01.png"
DRAWN = ("02", "03", "04", "05")  # threads, shm and bf16 would cover one of these


def draw(results: Results) -> plt.Figure:
    """How far the losses of each stage are from 01's, in each step."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    rows, ends = results["rows"], dict[str, float]()
    for key in DRAWN:
        if {key, "01"} <= rows.keys():
            pairs = zip(rows["01"]["losses"], rows[key]["losses"], strict=True)
            distances = [max(abs(a - b), 1e-9) for a, b in pairs]
            axes.plot(range(1, len(distances) + 1), distances, color=VARIANT_COLORS[key])
            ends[key] = statistics.geometric_mean(distances[-10:])
    lowest = 0.0
    for key, end in sorted(ends.items(), key=lambda item: item[1]):
        lowest = max(end, 5 * lowest)  # so that no name covers another
        place = len(rows[key]["losses"]) + 1, lowest
        axes.annotate(rows[key]["label"], place, color=VARIANT_COLORS[key], va="center")
    axes.axhline(EQUAL, color="gray", linewidth=0.8, linestyle=":")
    axes.set(title="Distance from 01's loss: below the dotted line it is rounding")
    axes.set(xlabel="optimizer step", ylabel="|difference| (0 drawn as 1e-9)", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def digest(results: Results) -> str:
    """Of what the picture shows and of what draws it: the file holds it, and a test compares it."""
    shown = {key: row["losses"] for key, row in results["rows"].items()}
    return hashlib.sha256((json.dumps(shown) + inspect.getsource(draw)).encode()).hexdigest()


def save_picture(results: Results, folder: Path) -> None:
    matplotlib.use("Agg")  # a file, no window
    draw(results).savefig(folder / PICTURE, dpi=110, metadata={"made of": digest(results)})
