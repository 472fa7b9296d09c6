"""Pictures of what process_memory.py counts. Each takes its results, and the axes to draw on."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from process_memory import MIB, STAGES, Held

STYLES = {  # Okabe and Ito; hatches, for those who see no colours
    "parameters": ("#0072B2", ""),
    "buffers": ("#000000", ""),
    "gradients": ("#56B4E9", "//"),
    "buckets": ("#E69F00", "\\\\"),
    "optimiser": ("#999999", ".."),
    "batch": ("#F0E442", ""),
    "activations": ("#009E73", "xx"),
    "outputs and loss": ("#D55E00", ""),
    "at the peak": ("#FFFFFF", ""),
}
LABELS = {"buckets": "buckets of DDP", "at the peak": "for a moment, at the peak"}


def stack(
    axes: Axes, place: float, held: Held, width: float = 0.8, most: int | None = None
) -> float:
    """A bar of what is held, and of what is there for a moment; returns where it ends, in MiB."""
    extra = max(0, most - sum(held.values())) if most else 0
    bottom = 0.0
    for kind, (colour, hatch) in STYLES.items():
        height = {**held, "at the peak": extra}.get(kind, 0) / MIB
        look: Any = {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
        axes.bar(place, height, width, bottom, **look)
        bottom += height
    return bottom


def legend(axes: Axes, **where: Any) -> None:
    """What each colour is; the buffers of BatchNorm are too few bytes to be seen."""
    patches = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", label=LABELS.get(kind, kind))
        for kind, (colour, hatch) in STYLES.items()
    ]
    axes.legend(handles=patches[::-1], fontsize="small", **where)


def draw_stages(axes: Axes, found: dict[str, Any]) -> None:
    """A bar for each replica or rank of each stage."""
    places, names = [], []
    for left, (key, stage) in enumerate(found["stages"].items()):
        held, shared = stage["held"], key == "02"  # its peak is that of all replicas together
        for number, each in enumerate(held):
            most = None if shared else stage["peak_bytes"][number]
            place = left + (number - (len(held) - 1) / 2) * 0.42
            end = stack(axes, place, each, 0.38, most)
            axes.text(place, end + 2, f"{end:.0f}", ha="center", fontsize="small")
        places.append(left)
        names.append(STAGES[key].replace(" ", "\n", 1) + ("\n(virtual)" if shared else ""))
    axes.set_xticks(places, names)
    axes.set(ylabel="MiB", title=f"What a replica or rank holds: {settings(found)}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)


def settings(found: dict[str, Any]) -> str:
    return "{model}, {image_size} pixels, global batch {global_batch}".format(**found)


def draw_resident(axes: Axes, found: dict[str, Any]) -> None:
    """Why bytes of tensors are counted: the resident set of a process, and what is ours in it."""
    stage = found["stages"]["01"]
    before, after = (each / MIB for each in stage["resident_bytes"][0])
    counted = stage["peak_bytes"][0] / MIB
    bars = {"before any tensor:\nPython and PyTorch": before, "after some steps": after}
    bars["counted: tensors\nat the peak"] = counted
    axes.barh(list(bars), list(bars.values()), color=["#999999", "#56B4E9", "#009E73"])
    for place, each in enumerate(bars.values()):
        axes.text(each, place, f" {each:.0f}", va="center")
    axes.set(xlabel="MiB", title="Stage 01: the process, and what is counted of it")
    axes.set_xlim(0, 1.1 * max(bars.values()))
    axes.invert_yaxis()


def draw_worlds(left: Axes, right: Axes, found: dict[str, Any]) -> None:
    """Left DataParallel's replicas, right DDP's ranks; the same global batch everywhere."""
    for axes, how in ((left, "DataParallel"), (right, "DDP")):
        place, middles = 0.0, []
        for each in found["worlds"].values():
            many = each[how]
            for number, held in enumerate(many):
                end = stack(axes, place + number, held, 1.0)
                if number in (0, 1) and (number == 0 or how == "DataParallel"):
                    axes.text(place + number, end + 2, f"{end:.0f}", ha="center", fontsize="small")
            middles.append(place + (len(many) - 1) / 2)
            place += len(many) + 1.5
        axes.set_xticks(middles, list(found["worlds"]))
    left.set(title="DataParallel: virtual replicas", xlabel="replicas", ylabel="MiB held")
    right.set(title="DDP: real ranks, over gloo", xlabel="ranks", ylabel="MiB held")
    top = 1.05 * max(left.get_ylim()[1], right.get_ylim()[1])
    left.set_ylim(0, top)
    right.set_ylim(0, top)


def draw_ways(axes: Axes, found: dict[str, Any]) -> None:
    """Each way to hold less: what the first rank holds, and its peak as a part of the first's."""
    first = max(next(iter(found["ways"].values()))["peak_bytes"])
    for place, way in enumerate(found["ways"].values()):
        most = max(way["peak_bytes"])
        end = stack(axes, place, way["held"][0], 0.7, most)
        change = f"{100 * (most / first - 1):+.0f} %" if place else f"{most / MIB:.0f}"
        axes.text(place, end + 2, change, ha="center")
    names = [name.replace(", ", ",\n").replace(" of ", "\nof ") for name in found["ways"]]
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set(ylabel="MiB", title=f"What each way saves of a rank's peak: {settings(found)}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)


def draw_foreseen(axes: Axes, found: dict[str, Any]) -> None:
    """How far each prediction is from the peak that was measured."""
    rows = found["foreseen"]
    off = [row["percent_off"] for row in rows.values()]
    axes.axvspan(-5, 5, color="#F0E442", alpha=0.3, label="within 5 %")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.hlines(range(len(rows)), 0, off, color="#999999")
    axes.plot(off, range(len(rows)), "o", color="#0072B2", label="predicted − measured")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    edge = max(6.0, 1.1 * max(map(abs, off)))
    axes.set(xlim=(-edge, edge), xlabel="% of the measured peak", title="Predicted and measured")
    axes.legend(fontsize="small")
