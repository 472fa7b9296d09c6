"""Draw what each rank holds, in the four levels: Figure 1 of the ZeRO paper, for four ranks.

python beyond/shard/plot_memory.py
"""

import hashlib
import inspect
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.options import Parser
from levels import LEVELS
from measure_levels import KINDS, formula

RANKS = 4
TITLES = ("a  DDP", "b  ZeRO-1", "c  ZeRO-2", "d  FSDP (ZeRO-3)")
COLORS = dict(zip(KINDS, ("#0072B2", "#E69F00", "#009E73"), strict=True))  # Okabe and Ito's
FILE = Path(__file__).with_name("memory.png")


def draw() -> Figure:
    """A panel for each level, a column for each rank. Pale is what the others hold."""
    figure, axes = plt.subplots(1, len(LEVELS), figsize=(9, 3.6), sharey=True, layout="constrained")
    unsharded = formula("none", RANKS)
    for axis, level, title in zip(axes, LEVELS, TITLES, strict=True):
        held = formula(level, RANKS)
        for rank in range(RANKS):
            bottom = 0.0
            for kind, color in COLORS.items():
                axis.bar(rank, unsharded[kind], 0.8, bottom, color=color, alpha=0.15)
                share = held[kind]
                start = bottom + (rank * share if share < unsharded[kind] else 0)
                axis.bar(rank, share, 0.8, start, color=color)
                bottom += unsharded[kind]
        total = sum(held.values())
        axis.set(title=title, xlabel=f"together {total:g}")
        axis.set_xticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("multiples of the parameters' bytes")
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches[::-1], loc="outside right center", fontsize=8)
    return figure


def picture_digest() -> str:
    """A digest of this file and of the formula that it draws."""
    source = Path(__file__).read_text() + inspect.getsource(formula)
    return hashlib.sha256(source.encode()).hexdigest()


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    matplotlib.use("Agg")  # files, no windows
    draw().savefig(FILE, dpi=110, metadata={"made of": picture_digest()})
    print(f"wrote {FILE.name}")
