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
import platform
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from tabulate import tabulate

from common.data import load_dataset, local_batch_size
from common.options import UsageError, exit_on, int_at_least, make_parser
from measure_memory import COPIES, HELD, measure, peak
from plots import MIB, bars, legend, stack
from stage_runs import StageRun, command_of, run_command
from timing import Results, hardware

EQUAL = 1e-5  # fp32 losses of the first epoch that differ less count as equal


@dataclass
class StageRow:
    """A stage with its flags; `run` is there when it has run."""

    key: str
    label: str
    color: str = "black"
    run: StageRun = field(default_factory=lambda: StageRun({}, []))

    @property
    def memory_job(self) -> str:
        """What count_memory calls it: neither threads nor shm change what is held."""
        return self.key.replace("-", " ").removesuffix(" cores").removesuffix(" shm")

    def shown(self, with_shm: bool) -> bool:
        """Rows over shm need a CPU and Linux; elsewhere, bf16 goes without."""
        return self.key != "05-bf16" if with_shm else not self.key.endswith("shm")


ROWS = [
    StageRow("01", "01 one process", "#000000"),
    StageRow("01-cores", "01 with all cores", "#888888"),
    StageRow("02", "02 DataParallel", "#E69F00"),
    StageRow("03", "03 by hand", "#56B4E9"),
    StageRow("04", "04 DDP", "#009E73"),
    StageRow("04-shm", "04 over shm", "#006048"),
    StageRow("05", "05 DDP, SyncBN", "#D55E00"),
    StageRow("05-shm", "05 over shm", "#8C3A00"),
    StageRow("05-bf16-shm", "05 in bf16 over shm", "#CC79A7"),
    StageRow("05-bf16", "05 in bf16", "#CC79A7"),
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
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    args.ranks = args.ranks or gpus or 2
    args.batch_size = args.batch_size or max(1, 120 // args.ranks) * args.ranks
    local_batch_size(args.batch_size, args.ranks)
    return args


def run(row: StageRow, args: Namespace, folder: Path) -> None:
    """Run a stage as a reader would, show what it prints, and read what it leaves behind."""
    threads = os.cpu_count() or 1 if row.key == "01-cores" else 1
    env = {"OMP_NUM_THREADS": str(threads)}  # of each rank, and of 01
    command = command_of(row.key.removesuffix("-cores"), args.ranks)
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    if row.key == "03" and args.ranks <= gpus:
        command += ["--backend", "nccl"]  # as 04 does by default
    if row.key[:2] in ("04", "05") and gpus and args.ranks > gpus:
        command += ["--backend", "gloo"]  # nccl refuses two ranks on one GPU
    if args.ranks < gpus:  # 02 takes all GPUs that it sees
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: args.ranks])
    for name, default in vars(make_parser("", "").parse_args([])).items():
        value = getattr(args, name)
        if value != default and name not in ("stage", "run_dir"):
            command += [f"--{name.replace('_', '-')}", str(value)]
    print(f"\n{row.label}: python {' '.join(command)}", flush=True)
    try:
        row.run = run_command(command, folder, env, show=True)
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
    stages: Results = {}
    for world_size, known in ((1, ("01", "02")), (args.ranks, ("03", "04", "05"))):
        jobs = dict.fromkeys(row.memory_job for row in rows if row.key[:2] in known)
        if jobs:
            stages |= measure(jobs, plan, args.batch_size // world_size, world_size, args.ranks)
    about = {"model": args.model, "image_size": plan.image_size, "global_batch": args.batch_size}
    return {**about, "stages": stages}


def draw_distances(
    axes: Axes, results: Results, labels: Sequence[str], named: bool = False
) -> None:
    """How far the losses of these rows are from 01's, in each step; each named beside its line."""
    losses_of_01, color_of = results["losses"].get(ROWS[0].label), {r.label: r.color for r in ROWS}
    ends: dict[str, float] = {}
    for label in labels[1:] if losses_of_01 else ():
        if losses := results["losses"].get(label):
            pairs = zip(losses_of_01, losses, strict=True)
            distances = [max(abs(a - b), 1e-9) for a, b in pairs]
            axes.plot(range(1, len(losses) + 1), distances, color=color_of[label])
            ends[label] = statistics.geometric_mean(distances[-10:])
    lowest = 0.0
    for label in sorted(ends, key=ends.__getitem__) if named else ():
        lowest = max(ends[label], 5 * lowest)  # so that no name covers another
        axes.annotate(label, (len(losses_of_01) + 1, lowest), color=color_of[label], va="center")
    axes.axhline(EQUAL, color="gray", linewidth=0.8, linestyle=":")
    axes.set(title="Distance from 01's loss: below the dotted line it is rounding")
    axes.set(xlabel="optimizer step", ylabel="|difference| (0 drawn as 1e-9)", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)


def draw_repeats(results: Results) -> plt.Figure:
    """Which stage repeats 01? The picture of the first page."""
    matplotlib.use("Agg")  # a file, no window
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    labels = ["01 one process", "02 DataParallel", "03 by hand", "04 DDP", "05 DDP, SyncBN"]
    draw_distances(axes, results, labels, named=True)
    return figure


def draw(results: Results) -> plt.Figure:
    """Loss curves, throughput and memory, of tour.json: the picture of the tour."""
    matplotlib.use("Agg")  # a file, no window
    rows: dict[str, dict] = results["rows"]
    first = next(iter(rows.values()))
    figure = plt.figure(figsize=(13, 7.5), layout="constrained")
    parts = figure.subplot_mosaic("LLSS;DDMC")
    curves, speed, distance, memory, copies = (parts[key] for key in "LSDMC")
    color_of = {row.label: row.color for row in ROWS}
    for name, losses in results["losses"].items():
        steps = range(1, len(losses) + 1)
        (line,) = curves.plot(steps, losses, color=color_of[name], label=name)
        if name == ROWS[0].label:  # wide and pale, so that other lines on it stay visible
            line.set(linewidth=6, alpha=0.3)
    draw_distances(distance, results, [row.label for row in ROWS])
    curves.set(title=f"Training loss: {first['model']} on {first['dataset']}", yscale="log")
    curves.set(ylabel="loss of the global batch")
    curves.set_ylim(top=4 * curves.get_ylim()[1])  # room for the legend above the curves
    curves.legend(ncols=2, fontsize="small", loc="upper right")

    speeds = {name: row["samples_per_second"] for name, row in rows.items()}
    texts = [f"{each / first['samples_per_second']:.2f}" for each in speeds.values()]
    bars(speed, speeds, [(color_of[name], "") for name in rows], texts)
    title = f"Throughput, all ranks together; beside it: times {next(iter(rows))}"
    speed.set(title=title, xlabel="samples/s (median step)")
    held = {
        key.replace(" ", "\n"): stage["held"] for key, stage in results["memory"]["stages"].items()
    }
    stack(memory, held, HELD)
    memory.set_title("What each replica holds")
    stack(copies, held, COPIES)
    copies.set(title="Of it: the copies of the model", ylabel="")
    legend(copies, HELD, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in parts.values():
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def digest(results: Results) -> str:
    """Of what the picture shows and of what draws it: the file holds it, and a test compares it."""
    shown = json.dumps([results[key] for key in ("rows", "losses", "memory")])
    sources = [inspect.getsource(each) for each in (draw, draw_distances, draw_repeats)]
    return hashlib.sha256((shown + "".join(sources)).encode()).hexdigest()


def save_pictures(results: Results, folder: Path) -> None:
    for name, draw_picture in (("tour.png", draw), ("repeats_01.png", draw_repeats)):
        metadata = {"made of": digest(results)}
        draw_picture(results).savefig(folder / name, dpi=110, metadata=metadata)


def tabulate_rows(results: Results, style: str) -> str:
    rows, stages = results["rows"], results["memory"]["stages"]
    first = next(iter(rows))
    headers = ["stage", "global batch", "train loss", "test accuracy", "samples/s"]
    headers += [f"times {first[:2]}", "step ms (quartiles)", "MiB of tensors"]
    lines = []
    for row in (row for row in ROWS if row.label in rows):
        summary, held = rows[row.label], stages[row.memory_job]["held"]
        low, high = summary["step_ms_quartiles"]
        speed = summary["samples_per_second"]
        line = [
            row.label,
            f"{summary['global_batch'] // summary['local_batch']} × {summary['local_batch']}",
            f"{summary['train_loss']:.4f}",
            f"{summary['test_accuracy']:.2%}",
            f"{speed:,.0f}",
            f"{speed / rows[first]['samples_per_second']:.2f}",
            f"{summary['step_ms']:.1f} ({low:.1f} to {high:.1f})",
            " + ".join(f"{sum(each.values()) / MIB:.1f}" for each in held),
        ]
        lines.append(line)
    right = ("left", *["right"] * (len(headers) - 1))
    return tabulate(lines, headers, style, colalign=right, disable_numparse=True)


def report(rows: list[StageRow], results: Results, args: Namespace, seconds: float) -> str:
    summary, first = rows[0].run.summary, rows[0].key[:2]
    lines = [
        f"# The tour: {args.model} on {args.dataset}, {args.ranks} ranks",
        "",
        f"Measured on {results['date']} in {seconds:.0f} s: {results['hardware']}, "
        f"{summary['device']}, torch {summary['torch']}, Python {results['python']}. "
        f"{args.epochs} epochs, global batch {args.batch_size}, one run of each. "
        "Each process has one thread, except in the row with all cores.",
        "",
        tabulate_rows(results, "github"),
        "",
        "Global batch: the number of processes or copies of the model × the local batch. "
        f"samples/s: from the median step. times {first}: speed, {first} = 1. "
        "MiB of tensors: what each process or copy holds at the end of forward, without "
        "PyTorch itself.",
        "",
        "![loss curves, speed and memory](tour.png)",
        "",
    ]
    if first == "01":
        lines += ["## Which stages repeat 01, and why", ""]
        lines += [f"- **{row.label}** {explain(row, rows[0], args)}" for row in rows[1:]]
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    with_shm = not on_gpu and sys.platform == "linux"
    rows = [row for row in ROWS if row.key[:2] in args.stages and row.shown(with_shm)]
    if on_gpu:  # they are not compared with a CPU
        rows = [row for row in rows if row.key != "01-cores"]
    for row in rows:
        run(row, args, args.run_dir / row.key)
    device = torch.device("cuda" if on_gpu else "cpu")
    results = {
        "date": str(date.today()),
        "hardware": hardware(device, args.ranks),
        "python": platform.python_version(),
        "rows": {row.label: row.run.summary for row in rows},
        "losses": {row.label: row.run.losses() for row in rows},  # of every step
        "memory": count_memory(rows, args),
    }
    text = report(rows, results, args, time.perf_counter() - started)
    (args.run_dir / "report.md").write_text(text)
    save_pictures(results, args.run_dir)
    (args.run_dir / "tour.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{tabulate_rows(results, 'simple')}\n\nwrote {args.run_dir}/report.md and tour.png")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
