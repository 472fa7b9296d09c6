"""Draw and store where gradients lie among the numbers of fp16: results/05_gradients.png and .json.

    python benchmarks/gradients.py

Of net-bn and all 1,500 digits as one batch, before training and after ten epochs of it: how large
the gradients of the layers' outputs are in fp32, and how many of them a backward in 16 bits finds
to be 0, with the loss scaled and without. Values are counted, nothing is timed.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from common.options import Parser, usage_errors_exit

from timing import RESULTS, chapter, draw_picture, provenance, save

loss_scaling: Any = chapter("05", "loss_scaling")

EPOCHS, BATCH = 10, 120
LOWEST, HIGHEST = -60, 20  # powers of 2 at the ends of the histogram
SHIFT = 16  # of the scaled loss, in powers of 2
RANGES = {  # of fp16, in powers of 2: torch.finfo(torch.float16) tells them
    "0": (LOWEST, -25, "#999999"),
    "fewer digits": (-25, -14, "#F0E442"),
    "all digits": (-14, 16, "#FFFFFF"),
    "inf": (16, HIGHEST, "#CC79A7"),
}


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = SGD(model.parameters(), 0.02, 0.9)
    for _ in range(EPOCHS):
        for part, targets in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(part), targets).backward()
            optimizer.step()


def count(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """The histogram of one batch, and for each layer and format the share that becomes 0."""
    true, weights = loss_scaling.gradients_of(model, images, labels, None)
    values = torch.cat([gradient.flatten() for gradient in true.values()])
    powers = values[values != 0].abs().log2()
    found: dict[str, Any] = {
        "values": values.numel(),
        "zeros": int((values == 0).sum()),
        "histogram": powers.histc(HIGHEST - LOWEST, LOWEST, HIGHEST).int().tolist(),
        "becomes_zero": {},
        "weight_gradients_off": {},
    }
    for name, how in loss_scaling.FORMATS.items():
        outputs, of_weights = loss_scaling.gradients_of(model, images, labels, *how)
        lost = {key: (outputs[key] == 0) & (true[key] != 0) for key in true}
        total = sum(int(each.sum()) for each in lost.values()) / len(powers)
        shares = {key: round(each.double().mean().item(), 5) for key, each in lost.items()}
        found["becomes_zero"][name] = {"all layers": round(total, 5), **shares}
        found["weight_gradients_off"][name] = {
            key: round(((of_weights[key] - each).norm() / each.norm()).item(), 5)
            for key, each in weights.items()
        }
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    figure, panels = plt.subplots(2, 1, figsize=(9, 8), layout="constrained", sharex=True)
    centred: dict[str, Any] = {"ha": "center", "va": "top"}
    for panel, (title, found) in zip(panels, results["batches"].items(), strict=True):
        for name, (start, end, colour) in RANGES.items():
            panel.axvspan(start, end, color=colour, alpha=0.35, linewidth=0)
            panel.text((start + end) / 2, 17.5, name, **centred)
        shares = [100 * n / found["values"] for n in found["histogram"]]
        styles = {"fp16": (0, "#0072B2"), f"fp16, loss × {2**SHIFT}": (SHIFT, "#D55E00")}
        for kind, (shift, colour) in styles.items():
            edges = range(LOWEST + shift, HIGHEST + shift + 1)
            label = f"{kind}: {100 * found['becomes_zero'][kind]['all layers']:.1f} % become 0"
            panel.stairs(shares, edges, color=colour, fill=not shift, linewidth=2, label=label)
        panel.set(title=title, ylabel="share of the values, %")
        panel.set(xlim=(LOWEST, HIGHEST), ylim=(0, 18))
        panel.legend(loc="upper left", bbox_to_anchor=(0.01, 0.9))
    ticks = list(range(LOWEST, HIGHEST + 1, 10))
    panels[-1].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    text = "size of a gradient, as fp32 has it; behind it, what fp16 makes of that size"
    panels[-1].set_xlabel(text)
    figure.suptitle(
        f"Gradients of the layers' outputs: net-bn, {results['batch']:,} digits as one batch\n"
        f"{results['provenance']['hardware']}, torch {results['provenance']['torch']}"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there, and draw nothing")
    args = parser.parse_args()
    model, images, labels = loss_scaling.example()
    batches = {"before training": count(model, images, labels)}
    train(model, images, labels)
    batches[f"after {EPOCHS} epochs in fp32"] = count(model, images, labels)
    results = {
        "provenance": provenance(command="python benchmarks/gradients.py"),
        "batch": len(images),
        "scale": loss_scaling.SCALE,
        "lowest_power_of_2": LOWEST,
        "batches": batches,
    }
    if args.out:
        save(args.out, results)
    else:
        save(RESULTS / "05_gradients.json", results)
        draw_picture("05_gradients", draw)
    for title, found in batches.items():
        lost = {
            name: f"{shares['all layers']:.2%}" for name, shares in found["becomes_zero"].items()
        }
        print(title, "becomes zero:", lost)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
