"""Run the five stages in order on this machine, compare them, and say which of them repeat 01.

    python benchmarks/tour.py
    python benchmarks/tour.py --ranks 3 --stages 01,05 --epochs 3

Every flag that all stages share is passed to them.
"""

import hashlib
import inspect
import json
import math
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from tabulate import tabulate

from common.data import load_dataset, local_batch_size
from common.options import UsageError, exit_on, int_at_least, make_parser
from measure_memory import COPIES, HELD, measure_stages, peak
from plots import MIB, bars, legend, stack, stage_color
from stage_runs import StageRun, command_of, run_command
from timing import Results, provenance, save

EQUAL = 1e-5  # fp32 losses of the first epoch that differ less count as equal


@dataclass
class StageRow:
    """A stage with its flags; `run` is there when it has run."""

    key: str
    label: str
    run: StageRun = field(default_factory=lambda: StageRun({}, []))

    @property
    def memory_job(self) -> str:
        """What count_memory calls it: neither threads nor shm change what is held."""
        return self.key.replace("-", " ").removesuffix(" cores").removesuffix(" shm")

    def shown(self, with_shm: bool) -> bool:
        """Rows over shm need a CPU and Linux; elsewhere, bf16 goes without."""
        return self.key != "05-bf16" if with_shm else not self.key.endswith("shm")


ROWS = [
    StageRow("01", "01 one process"),
    StageRow("01-cores", "01 with all cores"),
    StageRow("02", "02 DataParallel"),
    StageRow("03", "03 by hand"),
    StageRow("04", "04 DDP"),
    StageRow("04-shm", "04 over shm"),
    StageRow("05", "05 DDP, SyncBN"),
    StageRow("05-shm", "05 over shm"),
    StageRow("05-bf16-shm", "05 in bf16 over shm"),
    StageRow("05-bf16", "05 in bf16"),
]


def parse_args() -> Namespace:
    parser = make_parser("tour", __doc__)
    parser.add_argument("--ranks", type=int_at_least(1), metavar="N", help="None: all GPUs, or 2")
    parser.add_argument("--stages", default="01,02,03,04,05", help="which to run, as in 01,04")
    parser.set_defaults(model="net-bn", batch_size=None, epochs=4)
    args = parser.parse_args()
    known = {row.key[:2] for row in ROWS}
    args.stages = args.stages.split(",")
    if not set(args.stages) <= known:
        stages = ",".join(args.stages)
        raise UsageError(f"--stages {stages}: expected one or more of {','.join(sorted(known))}")
    if args.resume or args.evaluate:
        raise UsageError("the tour only trains: give --resume and --evaluate to a stage")
    args.gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    args.ranks = args.ranks or args.gpus or 2
    args.batch_size = args.batch_size or max(1, 120 // args.ranks) * args.ranks
    local_batch_size(args.batch_size, args.ranks)
    return args


def run(row: StageRow, args: Namespace, folder: Path) -> None:
    """Run a stage as a reader would, show what it prints, and read what it leaves behind."""
    threads = os.cpu_count() or 1 if row.key == "01-cores" else 1
    command = command_of(row.key.removesuffix("-cores"), args.ranks)
    if row.key == "03" and args.ranks <= args.gpus:
        command += ["--backend", "nccl"]  # as 04 does by default
    if row.key[:2] in ("04", "05") and 0 < args.gpus < args.ranks:
        command += ["--backend", "gloo"]  # nccl refuses two ranks on one GPU
    for name, default in vars(make_parser("", "").parse_args([])).items():
        value = getattr(args, name)
        if value != default and name not in ("stage", "run_dir"):
            command += [f"--{name.replace('_', '-')}", str(value)]
    print(f"\n{row.label}: python {' '.join(command)}", flush=True)
    try:
        row.run = run_command(command, folder, threads, show=True)
    except SystemExit as end:
        print(f"error: {row.label} ended with status {end.code}", file=sys.stderr)
        raise


def explain(row: StageRow, first: StageRow, args: Namespace) -> str:
    """One sentence: does this row repeat the first one's losses, how closely, and why."""
    pairs = zip(first.run.losses(epochs=1), row.run.losses(epochs=1), strict=True)
    distances = [abs(a - b) for a, b in pairs]
    if not all(map(math.isfinite, distances)):
        return "cannot be compared with 01: a loss is not finite."
    largest = max(distances)
    if largest <= EQUAL:
        return f"repeats 01 (largest difference in the first epoch: {largest:.0e})."
    causes = []
    if row.key == "03":
        causes.append("Its ranks own fixed shards, so its batches hold other samples.")
    if row.key[:2] in ("02", "03", "04") and args.ranks > 1 and args.model != "net":
        causes.append("BatchNorm takes its statistics from the local batch.")
    if args.model == "net" and args.ranks > 1:
        causes.append("The parts of a batch get other dropout masks than the whole batch.")
    if row.memory_job == "05 bf16":
        causes.append("A number in bf16 has 8 significant bits, in fp32 it has 24.")
    if row.run.summary.get("device") == "cuda":
        causes.append("By default, a GPU computes convolutions in TF32, with 11 bits.")
    causes = causes or ["Sums in another order are rounded otherwise, and steps amplify it."]
    result = f"does not repeat 01 (largest difference in the first epoch: {largest:.2g})."
    return " ".join((result, *causes))


def count_memory(rows: list[StageRow], args: Namespace) -> Results:
    """The bytes of tensors that each process or replica holds when the loss is there, by kind."""
    train_set, _ = load_dataset(args)
    image, _ = train_set[0]  # (C, H, W)
    device, classes = rows[0].run.summary["device"], len(train_set.classes)
    optimizer = "momentum" if args.momentum else "sgd"
    plan = peak.Plan(args.model, image.shape[-1], optimizer, device, image.shape[0], classes)
    keys = dict.fromkeys(row.memory_job for row in rows)
    return {"stages": measure_stages(keys, plan, args.batch_size, args.ranks)}


def draw_distances(axes: Axes, results: Results, rows: Sequence[StageRow]) -> dict[str, float]:
    """How far the losses of these rows are from 01's, in each step. Returns where they end."""
    losses, ends = results["losses"], {}
    for row in rows:
        if {row.label, "01 one process"} <= losses.keys():
            pairs = zip(losses["01 one process"], losses[row.label], strict=True)
            distances = [max(abs(a - b), 1e-9) for a, b in pairs]
            axes.plot(range(1, len(distances) + 1), distances, color=stage_color(row.label))
            ends[row.label] = statistics.geometric_mean(distances[-10:])
    axes.axhline(EQUAL, color="gray", linewidth=0.8, linestyle=":")
    axes.set(title="Distance from 01's loss: below the dotted line it is rounding")
    axes.set(xlabel="optimizer step", ylabel="|difference| (0 drawn as 1e-9)", yscale="log")
    return ends


def draw_repeats(results: Results) -> plt.Figure:
    """Which stage repeats 01? The picture of the first page."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    rows = [row for row in ROWS if row.key in ("02", "03", "04", "05")]
    ends, lowest = draw_distances(axes, results, rows), 0.0
    for label, end in sorted(ends.items(), key=lambda item: item[1]):
        lowest = max(end, 5 * lowest)  # so that no name covers another
        place = len(results["losses"][label]) + 1, lowest
        axes.annotate(label, place, color=stage_color(label), va="center")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw(results: Results) -> plt.Figure:
    """Loss curves, throughput and memory, of tour.json: the picture of the tour."""
    rows: dict[str, dict] = results["rows"]
    first_name, first = next(iter(rows.items()))
    figure = plt.figure(figsize=(13, 7.5), layout="constrained")
    parts = figure.subplot_mosaic("LLSS;DDMC")
    curves, speed, distance, memory, copies = (parts[key] for key in "LSDMC")

    for name, losses in results["losses"].items():
        # 01 is wide and pale, so that other lines on it stay visible.
        width, alpha = (6, 0.3) if name == ROWS[0].label else (1.5, 1)
        look: Any = {"color": stage_color(name), "label": name, "linewidth": width, "alpha": alpha}
        curves.plot(range(1, len(losses) + 1), losses, **look)
    curves.set(title=f"Training loss: {first['model']} on {first['dataset']}", yscale="log")
    curves.set(ylabel="loss of the global batch")
    curves.set_ylim(top=4 * curves.get_ylim()[1])  # room for the legend above the curves
    curves.legend(ncols=2, fontsize="small", loc="upper right")

    speeds = {name: row["samples_per_second"] for name, row in rows.items()}
    texts = [f"{each / speeds[first_name]:.2f}" for each in speeds.values()]
    bars(speed, speeds, [(stage_color(name), "") for name in rows], texts)
    speed.set(title=f"Throughput, all ranks together; beside it: times {first_name}")
    speed.set(xlabel="samples/s (median step)")

    draw_distances(distance, results, ROWS[1:])

    stages = results["memory"]["stages"].items()
    held = {key.replace(" ", "\n"): stage["held"] for key, stage in stages}
    stack(memory, held, HELD)
    memory.set_title("What each replica holds")
    stack(copies, held, COPIES)
    copies.set(title="Without batch and activations", ylabel="")
    memory.set_ylim(top=1.3 * memory.get_ylim()[1])  # room for the legend above the bars
    legend(memory, HELD, loc="upper right")
    for axes in parts.values():
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def digest(results: Results) -> str:
    """Of what the picture shows and of what draws it: the file holds it, and a test compares it."""
    shown = json.dumps([results[key] for key in ("rows", "losses", "memory")])
    sources = [inspect.getsource(each) for each in (draw, draw_distances, draw_repeats)]
    return hashlib.sha256((shown + "".join(sources)).encode()).hexdigest()


def save_pictures(results: Results, folder: Path) -> None:
    matplotlib.use("Agg")  # files, no window
    for name, draw_picture in (("tour.png", draw), ("repeats_01.png", draw_repeats)):
        metadata = {"made of": digest(results)}
        draw_picture(results).savefig(folder / name, dpi=110, metadata=metadata)


def tabulate_rows(results: Results, style: str) -> str:
    rows, stages = results["rows"], results["memory"]["stages"]
    first, lines = next(iter(rows)), []
    for row in (row for row in ROWS if row.label in rows):
        summary, speed = rows[row.label], rows[row.label]["samples_per_second"]
        processes = summary["global_batch"] // summary["local_batch"]
        low, high = summary["step_ms_quartiles"]
        held = [sum(each.values()) / MIB for each in stages[row.memory_job]["held"]]
        lines.append(
            {
                "stage": row.label,
                "global batch": f"{processes} × {summary['local_batch']}",
                "train loss": f"{summary['train_loss']:.4f}",
                "test accuracy": f"{summary['test_accuracy']:.2%}",
                "samples/s": f"{speed:,.0f}",
                f"times {first[:2]}": f"{speed / rows[first]['samples_per_second']:.2f}",
                "step ms (quartiles)": f"{summary['step_ms']:.1f} ({low:.1f} to {high:.1f})",
                "MiB of tensors": " + ".join(f"{each:.1f}" for each in held),
            }
        )
    right = ("left", *["right"] * (len(lines[0]) - 1))
    return tabulate(lines, "keys", style, colalign=right, disable_numparse=True)


REPORT = """\
# The tour: {args.model} on {args.dataset}, {args.ranks} ranks

Measured on {date} in {seconds:.0f} s: {hardware}, {device}, torch {torch}, Python {python}. \
{args.epochs} epochs, global batch {args.batch_size}, one run of each. \
Each process has one thread, except in the row with all cores.

{table}

Global batch: the number of processes or copies of the model × the local batch. samples/s: from \
the median step. times {first}: speed, {first} = 1. MiB of tensors: what each process or copy \
holds at the end of forward, without PyTorch itself.

![loss curves, speed and memory](tour.png)

"""


def report(rows: list[StageRow], results: Results, args: Namespace, seconds: float) -> str:
    first, table = rows[0], tabulate_rows(results, "github")
    about = {**first.run.summary, **results, "first": first.key[:2], "table": table}
    text = REPORT.format(args=args, seconds=seconds, **about)
    if first.key == "01":
        text += "## Which stages repeat 01, and why\n\n"
        text += "".join(f"- **{row.label}** {explain(row, first, args)}\n" for row in rows[1:])
    return text


def main() -> None:
    args = parse_args()
    started, on_gpu = time.perf_counter(), args.device == "cuda"
    about = provenance(args.device)
    with_shm = not on_gpu and sys.platform == "linux"
    rows = [row for row in ROWS if row.key[:2] in args.stages and row.shown(with_shm)]
    if on_gpu:  # there, the cores of the CPU do not compute
        rows = [row for row in rows if row.key != "01-cores"]
    for row in rows:
        run(row, args, args.run_dir / row.key)
    results = {
        **about,
        "rows": {row.label: row.run.summary for row in rows},
        "losses": {row.label: row.run.losses() for row in rows},  # of every step
        "memory": count_memory(rows, args),
    }
    text = report(rows, results, args, time.perf_counter() - started)
    (args.run_dir / "report.md").write_text(text)
    save_pictures(results, args.run_dir)
    save(args.run_dir / "tour.json", results)
    print(f"\n{tabulate_rows(results, 'simple')}\n\nwrote {args.run_dir}/report.md and tour.png")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
