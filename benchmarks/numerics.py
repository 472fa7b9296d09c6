"""Values and losses of trainings. Nothing is timed, so other users of the machine do no harm.

Gradients: the sizes of the gradients of the layers' outputs in fp32; how many are 0 in 16 bits.
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
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from tqdm import tqdm

from plots import BLACK, BLUE, GRAY, GREEN, ORANGE, PINK, RED, YELLOW, Figure
from step import train_step
from timing import ROOT, Effort, Results, chapter

MODEL = "net-bn"
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


BATCHES = {240: BLACK, 120: BLUE, 60: GREEN, 30: ORANGE}  # of stage 01
SMALL, GROWTH, BASE_LRS, WARM_UP = 30, 8, (0.04, 0.08, 0.16), 2  # of stage 05; in epochs
RULES = {"none": BLUE, "sqrt": GREEN, "linear": ORANGE}
GOOD, WORST = 0.12, 3.0  # a test loss that is called so; where what is above, or nan, is drawn
CHANCE = math.log(10)  # the loss of guessing one of ten classes
DOTTED: Any = {"color": "#666666", "linestyle": ":", "linewidth": 1}


def train(stage: str, seed: int, **flags: Any) -> Results:
    """A run of a stage in this process: losses of each epoch, test loss, accuracy. nan is None."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    words += [f"--model={MODEL}", "--device=cpu", f"--data-dir={ROOT / 'data'}", f"--seed={seed}"]
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        sys.argv = ["train.py", *words, f"--run-dir={folder}"]
        chapter(stage, "train").main()
        if dist.is_initialized():
            dist.destroy_process_group()
        lines = [json.loads(x) for x in Path(folder, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(folder, "summary.json").read_text())
    numbers = dict.fromkeys(x["epoch"] for x in lines)
    epochs = [[x["loss"] for x in lines if x["epoch"] == number] for number in numbers]
    values = [summary["test_loss"], summary["test_accuracy"], *map(statistics.fmean, epochs)]
    loss, accuracy, *losses = [round(x, 4) if math.isfinite(x) else None for x in values]
    found = {"test_loss": loss, "test_accuracy": accuracy}
    return found if stage == "01" else {"losses": losses, **found}


def spread(values: Any) -> tuple[float, float, float]:
    """Median, smallest and largest of the seeds; nan counts as the worst."""
    numbers = [WORST if value is None else min(value, WORST) for value in values]
    return statistics.median(numbers), min(numbers), max(numbers)


def train_all(stage: str, jobs: dict[tuple[str, str], Results], effort: Effort) -> Results:
    seeds, epochs = min(3, effort.rounds), 1 if effort.quick else 8 if stage == "01" else 10
    runs: dict[str, dict[str, list]] = {}
    for (row, column), flags in tqdm(jobs.items()):
        each = [train(stage, seed, epochs=epochs, **flags) for seed in range(seeds)]
        runs.setdefault(row, {})[column] = each
    about = {"epochs": epochs, "seeds": seeds, "model": MODEL, "dataset": "digits"}
    return {"provenance": about, "runs": runs}


def measure_learning_rates_01(effort: Effort) -> Results:
    lrs = [round(0.005 * 2 ** (i / 2), 5) for i in range(0, 16, 8 if effort.quick else 1)]
    jobs = {(str(b), str(lr)): {"batch_size": b, "lr": lr} for b, lr in product(BATCHES, lrs)}
    return train_all("01", jobs, effort)


def measure_learning_rates_05(effort: Effort) -> Results:
    jobs = {}
    for lr in BASE_LRS[: 1 if effort.quick else 3]:
        base = {"base_batch_size": SMALL, "batch_size": SMALL * GROWTH, "lr": lr}
        jobs[str(lr), "batch 30"] = {**base, "batch_size": SMALL, "lr_rule": "none"}
        for rule, warm_up in product(RULES, (0, WARM_UP)):
            name = rule + (f", warm-up {warm_up} epochs" if warm_up else "")
            jobs[str(lr), name] = {**base, "lr_rule": rule, "warmup_epochs": warm_up}
    return train_all("05", jobs, effort)


def draw_learning_rates_01(results: Results) -> Figure:
    figure, panel = plt.subplots(figsize=(9, 5.2), layout="constrained")
    lrs, tuned = np.array(list(results["runs"]["240"]), float), 0.0
    for batch, color in BATCHES.items():  # 240 first
        runs, k = results["runs"][str(batch)].values(), 240 // batch
        spreads = [spread(run["test_loss"] for run in each) for each in runs]
        middle, low, high = np.array(spreads).T
        panel.plot(lrs, middle, color=color, label=f"batch {batch}")
        panel.fill_between(lrs, low, high, color=color, alpha=0.15, linewidth=0)
        tuned = tuned or lrs[middle <= GOOD].max()
        for shape, wanted in {"X": tuned, "s": tuned / k**0.5, "D": tuned / k}.items():
            place = np.abs(np.log(lrs / wanted)).argmin()
            mark = "o" if k == 1 else shape
            panel.plot(lrs[place], middle[place], mark, color=color, markersize=9)
    texts = "largest that works for 240", "kept", "divided by √K", "divided by K"
    for shape, text in zip("oXsD", texts, strict=True):
        panel.plot([], [], shape, color="#666666", label=text)
    panel.axhline(CHANCE, **DOTTED)
    panel.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="test loss")
    panel.legend(ncols=2)
    panel.set_title(
        "Stage 01, net-bn on digits, {epochs} epochs: the batch shrinks by K\nmedian and range of "
        "{seeds} seeds; {hardware}; dotted: the loss of guessing".format(**results["provenance"]),
        fontsize=10,
    )
    return figure


def draw_learning_rates_05(results: Results) -> Figure:
    figure, about = plt.figure(figsize=(14, 8), layout="constrained"), results["provenance"]
    panels = figure.subplots(2, 3, sharex="row", sharey="row", height_ratios=(3, 2))
    for above, below, (lr, variants) in zip(*panels, results["runs"].items(), strict=True):
        labels = [name.replace(f", warm-up {WARM_UP} epochs", " + warm-up") for name in variants]
        for place, (name, runs) in enumerate(variants.items()):
            color, warm = RULES.get(name.partition(",")[0], BLACK), "warm" in name
            middles = [spread(each)[0] for each in zip_longest(*(r["losses"] or [] for r in runs))]
            samples, style = range(1500, 1500 * len(middles) + 1, 1500), "--" if warm else "-"
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
        "seeds\nwarm-up: 2 epochs; {hardware}; dotted: guessing; at 3: nan".format(**about)
    )
    return figure
