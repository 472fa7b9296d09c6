"""Train real stages with many learning rates, where the batch shrinks and where it grows.

    OMP_NUM_THREADS=1 python benchmarks/learning_rates.py

Writes 01_learning_rate.json and .png (stage 01, batches of 240 to 30, rates in steps of √2), and
05_learning_rates.json and .png (stage 05 in a world of one: from 30 to 240 with each rule) under
results/. What is measured are losses and accuracies: they do not depend on who else uses the
machine. `--only 01` does one of the two; `--draw` draws again what is stored.
"""

import json
import math
import runpy
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

from common.options import Parser, usage_errors_exit

from timing import RESULTS, ROOT, draw_picture, provenance, save

MODEL = "net-bn"
BLUE, ORANGE, GREEN, PURPLE, BLACK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000"
CHANCE = math.log(10)  # the loss of guessing one of ten classes
GOOD = 0.12  # a test loss that is called so
WORST = 3.0  # what is above, or nan, is drawn here

# Stage 01
BATCHES = {240: BLACK, 120: BLUE, 60: GREEN, 30: ORANGE}
EPOCHS = 8
# Stage 05
SMALL, GROWTH = 30, 8
BASE_LRS = (0.04, 0.08, 0.16)
LONG = 10  # epochs
RULES = {"none": BLUE, "sqrt": GREEN, "linear": ORANGE}
WARM_UP = 2  # epochs


def train(script: str, seed: int, **flags: object) -> dict[str, Any]:
    """A run of a stage in this process: losses of each epoch, test loss, accuracy. nan is None."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    folder = str((ROOT / script).parent)
    with TemporaryDirectory() as run_dir:
        more = [f"--model={MODEL}", "--device=cpu", f"--data-dir={ROOT / 'data'}", f"--seed={seed}"]
        sys.argv = [script, *words, *more, f"--run-dir={run_dir}"]
        sys.path.insert(0, folder)
        with redirect_stdout(StringIO()):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        sys.path.remove(folder)
        lines = [json.loads(x) for x in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(run_dir, "summary.json").read_text())
    epochs: dict[int, list[float]] = {}
    for line in lines:
        epochs.setdefault(line["epoch"], []).append(line["loss"])
    found = {name: finite(summary[name]) for name in ("test_loss", "test_accuracy")}
    return {"losses": [finite(statistics.fmean(each)) for each in epochs.values()], **found}


def finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def spread(values: Sequence[float | None]) -> tuple[float, float, float]:
    """Median, smallest and largest of the seeds; nan counts as the worst."""
    numbers = [WORST if value is None else min(value, WORST) for value in values]
    return statistics.median(numbers), min(numbers), max(numbers)


def shrink(args: Namespace) -> dict[str, Any]:
    """Stage 01: every batch with every rate; by batch, then by rate, the runs of all seeds."""
    lrs = [round(0.005 * 2 ** (i / 2), 5) for i in range(0, 16, 4 if args.quick else 1)]
    jobs = [(batch, lr, seed) for batch in BATCHES for lr in lrs for seed in range(args.seeds)]
    runs: dict[str, dict[str, list]] = {str(batch): {} for batch in BATCHES}
    for batch, lr, seed in tqdm(jobs, "01"):
        epochs = 1 if args.quick else EPOCHS
        run = train("01_single_gpu/train.py", seed, batch_size=batch, lr=lr, epochs=epochs)
        del run["losses"]
        runs[str(batch)].setdefault(str(lr), []).append(run)
    return {"runs": runs}


def grow(args: Namespace) -> dict[str, Any]:
    """Stage 05: by the rate of the small batch, then by rule and warm-up, the runs of all seeds."""
    variants: dict[str, dict[str, Any]] = {"batch 30": {"batch_size": SMALL, "lr_rule": "none"}}
    for rule in RULES:
        for warm_up in (0, WARM_UP):
            name = rule + (f", warm-up {warm_up} epochs" if warm_up else "")
            variants[name] = {"batch_size": SMALL * GROWTH, "lr_rule": rule}
            variants[name] |= {"warmup_epochs": warm_up}
    jobs = [(lr, name, seed) for lr in BASE_LRS for name in variants for seed in range(args.seeds)]
    runs: dict[str, dict[str, list]] = {str(lr): {} for lr in BASE_LRS}
    for lr, name, seed in tqdm(jobs, "05"):
        flags = variants[name] | {"base_batch_size": SMALL, "lr": lr}
        flags["epochs"] = 2 if args.quick else LONG
        run = train("05_amp_syncbn/train.py", seed, **flags)
        runs[str(lr)].setdefault(name, []).append(run)
    return {"runs": runs}


def rates_that_work(by_lr: dict[str, list]) -> list[float]:
    """Those whose median test loss is at most GOOD, in rising order."""
    medians = {float(lr): spread([r["test_loss"] for r in runs])[0] for lr, runs in by_lr.items()}
    return sorted(lr for lr, loss in medians.items() if loss <= GOOD) or [min(medians)]


def draw_shrink(results: dict[str, Any], path: Path) -> None:
    """Test loss against the rate, a line for each batch; the largest good one of 240, divided."""
    runs, tuned = results["runs"], rates_that_work(results["runs"]["240"])[-1]
    figure, panel = plt.subplots(figsize=(9, 5.2), layout="constrained")
    for batch, colour in BATCHES.items():
        lrs = [float(lr) for lr in runs[str(batch)]]
        spreads = [spread([r["test_loss"] for r in each]) for each in runs[str(batch)].values()]
        middle, low, high = (list(each) for each in zip(*spreads, strict=True))
        panel.plot(lrs, middle, color=colour, label=f"batch {batch}")
        panel.fill_between(lrs, low, high, color=colour, alpha=0.15, linewidth=0)
        k = 240 // batch
        marks = {"o": tuned} if k == 1 else {"X": tuned, "s": tuned / k**0.5, "D": tuned / k}
        for shape, lr in marks.items():
            nearest = min(range(len(lrs)), key=lambda i: abs(math.log(lrs[i] / lr)))
            panel.plot(lrs[nearest], middle[nearest], shape, color=colour, markersize=9)
    shapes = {
        "o": "largest that works for 240",
        "X": "kept",
        "s": "divided by √K",
        "D": "divided by K",
    }
    for shape, text in shapes.items():
        panel.plot([], [], shape, color="#666666", label=text)
    panel.axhline(CHANCE, color="#666666", linestyle=":", linewidth=1)
    panel.set(
        xscale="log", yscale="log", xlabel="learning rate", ylabel="test loss (cross-entropy)"
    )
    panel.legend(ncols=2)
    where = results["provenance"]
    panel.set_title(
        f"Stage 01, {MODEL} on digits, {where['epochs']} epochs: the batch shrinks by K\n"
        f"median and range of {where['seeds']} seeds; {where['hardware']}; "
        "dotted: the loss of guessing",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)


def draw_grow(results: dict[str, Any], path: Path) -> None:
    """A column for each rate: training loss by samples seen; the test accuracy at the end."""
    figure, panels = plt.subplots(
        2, len(BASE_LRS), figsize=(14, 8), sharex="row", sharey="row", height_ratios=(3, 2),
        layout="constrained",
    )  # fmt: skip
    for column, (lr, variants) in enumerate(results["runs"].items()):
        above, below = panels[0][column], panels[1][column]
        labels = [name.replace(f", warm-up {WARM_UP} epochs", " + warm-up") for name in variants]
        for place, (name, runs) in enumerate(variants.items()):
            colour = RULES.get(name.partition(",")[0], BLACK)
            curves = [run["losses"] or [] for run in runs]
            length = max(map(len, curves), default=0)
            padded = [curve + [None] * (length - len(curve)) for curve in curves]
            middle = [spread(each)[0] for each in zip(*padded, strict=True)]
            samples = [(epoch + 1) * 1500 for epoch in range(length)]
            style = "--" if "warm" in name else "-"
            above.plot(samples, middle, style, color=colour, label=labels[place])
            middle_, low, high = spread([run["test_loss"] for run in runs])
            below.errorbar(
                middle_, -place, xerr=[[middle_ - low], [high - middle_]], fmt="o", color=colour,
                mfc="white" if "warm" in name else colour, capsize=4,
            )  # fmt: skip
        above.set(yscale="log", xlabel="samples seen")
        above.set_title(f"rate {lr} for a batch of {SMALL}; then {SMALL * GROWTH}", fontsize=11)
        above.axhline(CHANCE, color="#666666", linestyle=":", linewidth=1)
        below.axvline(CHANCE, color="#666666", linestyle=":", linewidth=1)
        below.set(xscale="log", xlabel="test loss at the end, median and range")
        below.set_yticks([-place for place in range(len(variants))], labels)
    panels[0][0].set_ylabel("training loss of the epoch")
    panels[0][-1].legend(loc="lower left", fontsize=9)
    where = results["provenance"]
    figure.suptitle(
        f"Stage 05, {MODEL} on digits, {where['epochs']} epochs: the batch grows {GROWTH} times; "
        f"median of {where['seeds']} seeds\nwarm-up: {WARM_UP} epochs; {where['hardware']}; "
        f"dotted: the loss of guessing; at {WORST:.0f}: nan"
    )
    figure.savefig(path, dpi=100)


PARTS: dict[str, tuple[str, int, Callable, Callable]] = {
    "01": ("01_learning_rate", EPOCHS, shrink, draw_shrink),
    "05": ("05_learning_rates", LONG, grow, draw_grow),
}


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, metavar="PATH", help="the folder to write to, and draw nothing")
    add("--only", choices=tuple(PARTS), help="one of the two")
    add("--seeds", default=5, type=int, metavar="N", help="runs of each")
    add("--quick", action="store_true", help="few rates and epochs: to see that it works")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for key in [args.only] if args.only else PARTS:
        name, epochs, measure, draw = PARTS[key]
        about = {"epochs": epochs, "seeds": args.seeds, "model": MODEL, "dataset": "digits"}
        where = provenance(command="python benchmarks/learning_rates.py", **about)
        results = {"provenance": where, **measure(args)}
        save((args.out or RESULTS) / f"{name}.json", results)
        if not args.out:
            draw_picture(name, draw)
        print(f"wrote {name}.json to {args.out or 'results, and its picture'}")


if __name__ == "__main__":
    with usage_errors_exit():
        main()
