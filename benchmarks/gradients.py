"""How large the gradients of the layers' outputs are, and how many of them are 0 in 16 bits."""

from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.optim import SGD

from plots import BLUE, GRAY, PINK, RED, YELLOW, Figure
from step import train_step
from timing import Effort, Results, chapter

loss_scaling: Any = chapter("05", "loss_scaling")

LOWEST, HIGHEST = -60, 20  # powers of 2 at the ends of the histogram
RANGES = {  # of fp16, in powers of 2
    "0": (LOWEST, -25, GRAY),
    "fewer digits": (-25, -14, YELLOW),
    "all digits": (-14, 16, "#FFFFFF"),
    "inf": (16, HIGHEST, PINK),
}


def count(model: nn.Module, images: Tensor, labels: Tensor) -> Results:
    """The histogram of one batch, and for each format the share that becomes 0."""
    true, _ = loss_scaling.gradients_of(model, images, labels, None)
    values = torch.cat([gradient.flatten() for gradient in true.values()])
    powers, shares = values[values != 0].abs().log2(), {}
    for name, how in loss_scaling.FORMATS.items():
        outputs, _ = loss_scaling.gradients_of(model, images, labels, *how)
        lost = sum(int(((outputs[key] == 0) & (true[key] != 0)).sum()) for key in true)
        shares[name] = {"all layers": round(lost / len(powers), 5)}
    histogram = powers.histc(HIGHEST - LOWEST, LOWEST, HIGHEST).int().tolist()
    return {"values": values.numel(), "histogram": histogram, "becomes_zero": shares}


def measure_gradients(effort: Effort) -> Results:
    model, *batch = loss_scaling.example()
    images, labels = (each[:120] if effort.quick else each for each in batch)
    batches = {"before training": count(model, images, labels)}
    optimizer = SGD(model.parameters(), 0.02, 0.9)
    for _ in range(10):  # epochs
        for part, targets in zip(images.split(120), labels.split(120), strict=True):
            train_step(model, optimizer, part, targets)
    batches["after 10 epochs in fp32"] = count(model, images, labels)
    return {"batch": len(images), "scale": loss_scaling.SCALE, "batches": batches}


def draw_gradients(results: Results) -> Figure:
    figure, panels = plt.subplots(2, 1, figsize=(9, 8), layout="constrained", sharex=True)
    for panel, (title, found) in zip(panels, results["batches"].items(), strict=True):
        for name, (start, end, color) in RANGES.items():
            panel.axvspan(start, end, color=color, alpha=0.35, linewidth=0)
            panel.text((start + end) / 2, 17.5, name, ha="center", va="top")
        shares = [100 * n / found["values"] for n in found["histogram"]]
        for kind, shift, color in (("fp16", 0, BLUE), ("fp16, loss × 65536", 16, RED)):
            edges = range(LOWEST + shift, HIGHEST + shift + 1)
            label = f"{kind}: {100 * found['becomes_zero'][kind]['all layers']:.1f} % become 0"
            panel.stairs(shares, edges, color=color, fill=not shift, linewidth=2, label=label)
        panel.set(
            ylabel="share of the values, %", xlim=(LOWEST, HIGHEST), ylim=(0, 18), title=title
        )
        panel.legend(loc="upper left", bbox_to_anchor=(0.01, 0.9))
    ticks = range(LOWEST, HIGHEST + 1, 10)
    panels[-1].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    panels[-1].set_xlabel("size of a gradient, as fp32 has it; behind it, what fp16 makes of it")
    figure.suptitle(
        "Gradients of the layers' outputs: net-bn, {batch:,} digits as one batch\n"
        "{provenance[hardware]}, torch {provenance[torch]}".format(**results)
    )
    return figure
