"""What training finds, whoever else uses the machine: values and losses, nothing is timed.

Gradients: of net-bn and all 1,500 digits as one batch, before training and after ten epochs of it,
how large those of the layers' outputs are in fp32, and how many of them a backward in 16 bits finds
to be 0, with the loss scaled and without.

Learning rates: real stages, where the batch shrinks (01: from 240 to 30, rates in steps of √2) and
where it grows (05 in a world of one: from 30 to 240 with each rule).
"""

import json
import math
import statistics
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import product, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from tqdm import tqdm

from plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, YELLOW
from stages import program
from step import train_step
from timing import ROOT, Effort, Results, chapter

MODEL = "net-bn"
loss_scaling: Any = chapter("05", "loss_scaling")

LOWEST, HIGHEST = -60, 20  # powers of 2 at the ends of the histogram
RANGES = {  # of fp16, in powers of 2: torch.finfo(torch.float16) tells them
    "0": (LOWEST, -25, GREY),
    "fewer digits": (-25, -14, YELLOW),
    "all digits": (-14, 16, "#FFFFFF"),
    "inf": (16, HIGHEST, PINK),
}


def count(model: nn.Module, images: Tensor, labels: Tensor) -> Results:
    """The histogram of one batch, and for each layer and format the share that becomes 0."""
    true, _ = loss_scaling.gradients_of(model, images, labels, None)
    values = torch.cat([gradient.flatten() for gradient in true.values()])
    powers, shares = values[values != 0].abs().log2(), {}
    for name, how in loss_scaling.FORMATS.items():
        outputs, _ = loss_scaling.gradients_of(model, images, labels, *how)
        lost = {key: (outputs[key] == 0) & (true[key] != 0) for key in true}
        total = sum(int(each.sum()) for each in lost.values()) / len(powers)
        by_layer = {key: round(each.double().mean().item(), 5) for key, each in lost.items()}
        shares[name] = {"all layers": round(total, 5), **by_layer}
    histogram = powers.histc(HIGHEST - LOWEST, LOWEST, HIGHEST).int().tolist()
    return {"values": values.numel(), "histogram": histogram, "becomes_zero": shares}


def measure_gradients(effort: Effort) -> Results:
    model, *batch = loss_scaling.example()
    images, labels = (each[:120] if effort.quick else each for each in batch)
    optimizer, found = SGD(model.parameters(), 0.02, 0.9), count(model, images, labels)
    for _ in range(10):  # epochs
        for part, targets in zip(images.split(120), labels.split(120), strict=True):
            train_step(model, optimizer, part, targets)
    batches = {"before training": found}
    batches["after 10 epochs in fp32"] = count(model, images, labels)
    about = {"batch": len(images), "scale": loss_scaling.SCALE, "lowest_power_of_2": LOWEST}
    return {**about, "batches": batches}


def draw_gradients(results: Results, path: Path) -> None:
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
        panel.set(title=title, ylabel="share of the values, %")
        panel.set(xlim=(LOWEST, HIGHEST), ylim=(0, 18))
        panel.legend(loc="upper left", bbox_to_anchor=(0.01, 0.9))
    ticks = list(range(LOWEST, HIGHEST + 1, 10))
    panels[-1].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    panels[-1].set_xlabel("size of a gradient, as fp32 has it; behind it, what fp16 makes of it")
    figure.suptitle(
        "Gradients of the layers' outputs: net-bn, {batch:,} digits as one batch\n"
        "{provenance[hardware]}, torch {provenance[torch]}".format(**results)
    )
    figure.savefig(path, dpi=110)


SEEDS, EPOCHS = 5, {"01": 8, "05": 10}
BATCHES = {240: BLACK, 120: BLUE, 60: GREEN, 30: ORANGE}  # of stage 01
SMALL, GROWTH, BASE_LRS, WARM_UP = 30, 8, (0.04, 0.08, 0.16), 2  # of stage 05; in epochs
RULES = {"none": BLUE, "sqrt": GREEN, "linear": ORANGE}
GOOD = 0.12  # a test loss that is called so
WORST = 3.0  # what is above, or nan, is drawn here
CHANCE = math.log(10)  # the loss of guessing one of ten classes
DOTTED: Any = {"color": "#666666", "linestyle": ":", "linewidth": 1}


def train(stage: str, seed: int, **flags: object) -> Results:
    """A run of a stage in this process: losses of each epoch, test loss, accuracy. nan is None."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    words += [f"--model={MODEL}", "--device=cpu", f"--data-dir={ROOT / 'data'}", f"--seed={seed}"]
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        sys.argv = ["train.py", *words, f"--run-dir={folder}"]
        program(stage).main()
        if dist.is_initialized():
            dist.destroy_process_group()
        lines = [json.loads(x) for x in Path(folder, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(folder, "summary.json").read_text())
    epochs: dict[int, list[float]] = {}
    for line in lines:
        epochs.setdefault(line["epoch"], []).append(line["loss"])
    losses = {"losses": [finite(statistics.fmean(each)) for each in epochs.values()]}
    found = {name: finite(summary[name]) for name in ("test_loss", "test_accuracy")}
    return found if stage == "01" else losses | found


def finite(value: float) -> Any:
    return round(value, 4) if math.isfinite(value) else None


def spread(values: Any) -> tuple[float, float, float]:
    """Median, smallest and largest of the seeds; nan counts as the worst."""
    numbers = [WORST if value is None else min(value, WORST) for value in values]
    return statistics.median(numbers), min(numbers), max(numbers)


def train_all(stage: str, jobs: dict[tuple[str, str], Results], effort: Effort) -> Results:
    """The runs of all seeds, by the two names of each job."""
    seeds, epochs = min(SEEDS, effort.rounds), 1 if effort.quick else EPOCHS[stage]
    runs: dict[str, dict[str, list]] = {}
    for (row, column), flags in tqdm(jobs.items()):
        each = [train(stage, seed, epochs=epochs, **flags) for seed in range(seeds)]
        runs.setdefault(row, {})[column] = each
    about = {"epochs": epochs, "seeds": seeds, "model": MODEL, "dataset": "digits"}
    return {"provenance": about, "runs": runs}


def measure_learning_rates_01(effort: Effort) -> Results:
    lrs = [round(0.005 * 2 ** (i / 2), 5) for i in range(0, 16, 8 if effort.quick else 1)]
    pairs = product(BATCHES, lrs)
    jobs = {(str(batch), str(lr)): {"batch_size": batch, "lr": lr} for batch, lr in pairs}
    return train_all("01", jobs, effort)


def measure_learning_rates_05(effort: Effort) -> Results:
    jobs = {}
    for lr in BASE_LRS[: 1 if effort.quick else 3]:
        base = {"base_batch_size": SMALL, "lr": lr}
        jobs[str(lr), "batch 30"] = {**base, "batch_size": SMALL, "lr_rule": "none"}
        for rule, warm_up in product(RULES, (0, WARM_UP)):
            name = rule + (f", warm-up {warm_up} epochs" if warm_up else "")
            large = {"batch_size": SMALL * GROWTH, "lr_rule": rule, "warmup_epochs": warm_up}
            jobs[str(lr), name] = base | large
    return train_all("05", jobs, effort)


def draw_learning_rates_01(results: Results, path: Path) -> None:
    """Test loss against the rate, a line for each batch; the largest good one of 240, divided."""
    figure, panel = plt.subplots(figsize=(9, 5.2), layout="constrained")
    lrs = [float(lr) for lr in results["runs"]["240"]]
    losses = {  # of each batch and rate: median, smallest and largest
        int(batch): [spread(run["test_loss"] for run in each) for each in runs.values()]
        for batch, runs in results["runs"].items()
    }
    tuned = max(lr for lr, (middle, *_) in zip(lrs, losses[240], strict=True) if middle <= GOOD)
    for batch, color in BATCHES.items():
        middle, low, high = zip(*losses[batch], strict=True)
        panel.plot(lrs, middle, color=color, label=f"batch {batch}")
        panel.fill_between(lrs, low, high, color=color, alpha=0.15, linewidth=0)
        k = 240 // batch
        for shape, wanted in {"X": tuned, "s": tuned / k**0.5, "D": tuned / k}.items():
            near = [abs(math.log(lr / wanted)) for lr in lrs]
            place = near.index(min(near))
            mark = "o" if k == 1 else shape
            panel.plot(lrs[place], middle[place], mark, color=color, markersize=9)
    shapes = {"o": "largest that works for 240", "X": "kept", "s": "divided by √K"}
    for shape, text in {**shapes, "D": "divided by K"}.items():
        panel.plot([], [], shape, color="#666666", label=text)
    panel.axhline(CHANCE, **DOTTED)
    panel.set(xscale="log", yscale="log", xlabel="learning rate")
    panel.set_ylabel("test loss (cross-entropy)")
    panel.legend(ncols=2)
    panel.set_title(
        "Stage 01, net-bn on digits, {epochs} epochs: the batch shrinks by K\nmedian and range of "
        "{seeds} seeds; {hardware}; dotted: the loss of guessing".format(**results["provenance"]),
        fontsize=10,
    )
    figure.savefig(path, dpi=100)


def draw_learning_rates_05(results: Results, path: Path) -> None:
    """A column for each rate: training loss by samples seen; the test loss at the end."""
    figure = plt.figure(figsize=(14, 8), layout="constrained")
    panels = figure.subplots(2, 3, sharex="row", sharey="row", height_ratios=(3, 2))
    for above, below, (lr, variants) in zip(*panels, results["runs"].items(), strict=True):
        labels = [name.replace(f", warm-up {WARM_UP} epochs", " + warm-up") for name in variants]
        for place, (name, runs) in enumerate(variants.items()):
            color, warm = RULES.get(name.partition(",")[0], BLACK), "warm" in name
            losses = zip_longest(*(run["losses"] or [] for run in runs))  # nan: none
            middles = [spread(each)[0] for each in losses]
            samples = [(epoch + 1) * 1500 for epoch in range(len(middles))]
            style = "--" if warm else "-"
            above.plot(samples, middles, style, color=color, label=labels[place])
            middle, low, high = spread(run["test_loss"] for run in runs)
            look: Any = {"fmt": "o", "mfc": "white" if warm else color, "capsize": 4}
            far = [[middle - low], [high - middle]]
            below.errorbar(middle, -place, xerr=far, color=color, **look)
        above.set(yscale="log", xlabel="samples seen")
        above.set_title(f"rate {lr} for a batch of {SMALL}; then {SMALL * GROWTH}", fontsize=11)
        above.axhline(CHANCE, **DOTTED)
        below.axvline(CHANCE, **DOTTED)
        below.set(xscale="log", xlabel="test loss at the end, median and range")
        below.set_yticks([-place for place in range(len(variants))], labels)
    panels[0][0].set_ylabel("training loss of the epoch")
    panels[0][-1].legend(loc="lower left", fontsize=9)
    figure.suptitle(
        "Stage 05, net-bn on digits, {epochs} epochs: the batch grows 8 times; median of {seeds} "
        "seeds\nwarm-up: 2 epochs; {hardware}; dotted: the loss of guessing; at 3: nan".format(
            **results["provenance"]
        )
    )
    figure.savefig(path, dpi=100)
