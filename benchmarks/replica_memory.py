"""Draw and store what 02_data_parallel/memory.py counts: results/02_memory.png and .json.

    python benchmarks/replica_memory.py

Nothing is measured here: the bytes are counted, so they do not depend on the machine.
"""

from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from common.options import Parser, usage_errors_exit

from timing import RESULTS, chapter, draw_picture, provenance, save

memory: Any = chapter("02", "memory")

COLOURS = {  # Okabe and Ito: safe for colour-blind readers
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimiser": "#999999",
    "batch": "#F0E442",
    "activations": "#009E73",
    "outputs": "#D55E00",
    "loss": "#CC79A7",
}
LABELS = {  # what each colour is, for a reader who has only the picture
    "parameters": "parameters and buffers",
    "optimiser": "momentum of SGD",
    "activations": "saved activations",
    "outputs": "gathered outputs",
    "loss": "saved by the loss",
}
WIDTH = 0.38  # of a bar; two stand side by side


def draw(results: dict[str, Any], path: Path) -> None:
    """Stacked bars: a panel for each model, a pair of bars for each replica."""
    counts: dict[str, dict[str, list[dict[str, int]]]] = results["bytes"]
    figure, panels = plt.subplots(1, len(counts), figsize=(13, 5), layout="constrained")
    for panel, (name, both) in zip(panels, counts.items(), strict=True):
        for (side, held), replica in product(enumerate(both.values()), range(memory.REPLICAS)):
            bottom, place = 0.0, replica + (side - 0.5) * (WIDTH + 0.04)
            for kind, colour in COLOURS.items():
                height = held[replica][kind] / memory.MIB
                label = LABELS.get(kind, kind) if side == replica == 0 else None
                panel.bar(place, height, WIDTH, bottom, color=colour, label=label)
                bottom += height
            panel.text(place, bottom, ("out", "in")[side], ha="center", va="bottom", fontsize=9)
        panel.set(title=name, xticks=range(memory.REPLICAS), ylabel="MiB held")
        panel.set_xticklabels(["0\nmain device", *map(str, range(1, memory.REPLICAS))])
        panel.set_xlabel("replica")
        panel.margins(y=0.08)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    figure.suptitle(
        f"What {memory.REPLICAS} replicas hold of a batch of {memory.BATCH} before backward;"
        " the loss outside forward (out) or inside (in)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there, and draw nothing")
    args = parser.parse_args()
    counts = memory.count_all()
    models = {name: model for name, (model, _, _) in memory.examples().items()}
    results = {
        "provenance": provenance(command="python benchmarks/replica_memory.py"),
        "batch": memory.BATCH,
        "bytes": counts,
        "optimiser_bytes": {
            name: {kind: memory.after_a_step(model, kind)[1] for kind in memory.OPTIMISERS}
            for name, model in models.items()
        },
    }
    if args.out:
        return save(args.out, results)
    save(RESULTS / "02_memory.json", results)
    draw_picture("02_memory", draw)
    print("wrote 02_memory.json and 02_memory.png to results")


if __name__ == "__main__":
    with usage_errors_exit():
        main()
