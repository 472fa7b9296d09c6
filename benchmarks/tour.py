"""Run the five stages in order on this machine, compare them, and say what the picture shows.

    python benchmarks/tour.py
    python benchmarks/tour.py --ranks 3 --stages 01,05 --epochs 3

Every flag that all stages share is passed to them.
"""

import json
import math
import os
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from tabulate import tabulate

import process_memory
from common.data import load_dataset, local_batch_size
from common.options import UsageError, exit_on, int_at_least, make_parser
from run_stage import Run, command_of, run_command
from timing import chapter

COLORS = ["#000000", "#888888", "#E69F00", "#56B4E9", "#009E73"]
COLORS += ["#006048", "#D55E00", "#8C3A00", "#CC79A7", "#CC79A7"]  # the last row needs shm or not
COPIES = 5  # of the kinds of memory, those that do not grow with the batch
SAME = 1e-5  # fp32 losses of the first epoch that differ less count as equal


@dataclass
class Row:
    """A stage with its flags; `run` is there when it has run."""

    key: str
    label: str
    faster: str = ""  # why it is faster than the row before, if it is; why slower
    slower: str = ""
    run: Run = field(default_factory=lambda: Run({}, []))

    @property
    def job(self) -> str:
        """What count_memory calls it: neither threads nor shm change what is held."""
        return self.key.replace("-", " ").removesuffix(" cores").removesuffix(" shm")

    def shown(self, with_shm: bool) -> bool:
        """Rows over shm need a CPU and Linux; elsewhere, bf16 goes without."""
        return self.key != "05-bf16" if with_shm else not self.key.endswith("shm")


SHM = (
    "ranks read each other's memory and send nothing.",
    "ranks that wait for each other use the cores that compute.",
)
BF16 = (
    "its numbers have half the size, and this processor has units that multiply them.",
    "layers as small as these gain less from it than the conversions cost.",
)
WHY = {  # of each row: its label; why it is faster than the row before; why it is slower
    "01": ("01 one process", "", ""),
    "01-cores": (
        "01 with all cores",
        "one process divides each operation among the cores.",
        "its operations are too small to be divided.",
    ),
    "02": (
        "02 DataParallel",
        "a thread for each replica does more than the parts of one operation.",
        "it copies the model at every step, and its threads share one interpreter.",
    ),
    "03": (
        "03 by hand",
        "processes do not wait for one interpreter, and copy no model.",
        "it sends a message for each parameter, after backward, and waits for each.",
    ),
    "04": (
        "04 DDP",
        "gradients travel in few large messages, not in one for each parameter.",
        "its buckets cost more than they save here.",
    ),
    "04-shm": ("04 over shm", *SHM),
    "05": (
        "05 DDP, SyncBN",
        "it does more work, so the machine itself was faster during this run.",
        "each BatchNorm layer waits for the other ranks, in forward and in backward.",
    ),
    "05-shm": ("05 over shm", *SHM),
    "05-bf16-shm": ("05 in bf16 over shm", *BF16),
    "05-bf16": ("05 in bf16", *BF16),
}
ROWS = [Row(key, *texts) for key, texts in WHY.items()]


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


def run(row: Row, args: Namespace, folder: Path) -> None:
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


def explain(row: Row, first: Row, args: Namespace) -> str:
    """One sentence: does this row repeat the first one's losses, how closely, and why."""
    pairs = zip(first.run.losses(epochs=1), row.run.losses(epochs=1), strict=True)
    gaps = [abs(a - b) for a, b in pairs]
    if not all(map(math.isfinite, gaps)):
        return "cannot be compared with 01: a loss is not finite."
    gap = max(gaps)
    if gap <= SAME:
        return f"repeats 01 (largest difference in the first epoch: {gap:.0e})."
    causes = []
    if row.key == "03":
        causes.append("Its ranks own fixed shards, so its batches hold other samples.")
    if row.key[:2] in ("02", "03", "04") and args.ranks > 1 and args.model != "net":
        causes.append("BatchNorm takes its statistics from the local batch.")
    if args.model == "net" and args.ranks > 1:
        causes.append("The parts of a batch get other dropout masks than the whole batch.")
    if row.job == "05 bf16":
        causes.append("A number in bf16 has 8 significant bits, in fp32 it has 24.")
    if row.run.summary.get("device") == "cuda":
        causes.append("By default, a GPU computes convolutions in TF32, with 11 bits.")
    causes = causes or ["Sums in another order are rounded otherwise, and steps amplify it."]
    found = f"does not repeat 01 (largest difference in the first epoch: {gap:.2g})."
    return " ".join((found, *causes))


def explain_speed(row: Row, before: Row) -> str:
    """One sentence: how fast is this row beside the one before, and why."""
    ratio = row.run.summary["samples_per_second"] / before.run.summary["samples_per_second"]
    why = row.faster if ratio > 1 else row.slower
    if 0.95 < ratio < 1.05:
        return f"as fast as *{before.label}*, as far as one run can show."
    return f"{ratio:.2f} times the speed of *{before.label}*: {why}"


def pairs(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Each row with the one before it; but 05, as it runs over gloo, with 04 over gloo."""
    before = rows[0]
    for row in rows[1:]:
        yield before, row
        before = before if row.key == "04-shm" else row


def count_memory(rows: list[Row], args: Namespace) -> dict:
    """The bytes of tensors that each process or replica holds when the loss is there, by kind."""
    train_set, _ = load_dataset(args)
    image, _ = train_set[0]  # (C, H, W)
    device, classes = rows[0].run.summary["device"], len(train_set.classes)
    optimizer = "momentum" if args.momentum else "sgd"
    plan = process_memory.peak.Plan(
        args.model, image.shape[-1], optimizer, device, image.shape[0], classes
    )
    stages: dict = {}
    for world_size, known in ((1, ("01", "02")), (args.ranks, ("03", "04", "05"))):
        jobs = list(dict.fromkeys(row.job for row in rows if row.key[:2] in known))
        if jobs:
            stages |= process_memory.measure(
                jobs, plan, args.batch_size // world_size, world_size, args.ranks
            )
    about = {"model": args.model, "image_size": plan.image_size, "global_batch": args.batch_size}
    return {**about, "stages": stages}


def draw(results: dict) -> plt.Figure:
    """Loss curves, throughput and memory, of tour.json: the picture of the tour."""
    matplotlib.use("Agg")  # a file, no window
    rows: dict[str, dict] = results["rows"]
    first = next(iter(rows.values()))
    figure = plt.figure(figsize=(13, 7.5), layout="constrained")
    parts = figure.subplot_mosaic("LLSS;DDMC")
    curves, speed, distance, memory, copies = (parts[key] for key in "LSDMC")
    names, color_of = list(rows), dict(zip((row.label for row in ROWS), COLORS, strict=True))
    of_01 = results["losses"].get(ROWS[0].label)
    for name, losses in results["losses"].items():
        steps = range(1, len(losses) + 1)
        (line,) = curves.plot(steps, losses, color=color_of[name], label=name)
        if name == ROWS[0].label:  # wide and pale, so that other lines on it stay visible
            line.set(linewidth=6, alpha=0.3)
        elif of_01:
            gaps = [max(abs(a - b), 1e-9) for a, b in zip(of_01, losses, strict=True)]
            distance.plot(steps, gaps, color=color_of[name])
    curves.set(title=f"Training loss: {first['model']} on {first['dataset']}", yscale="log")
    curves.set(ylabel="loss of the global batch")
    curves.legend(ncols=2, fontsize="small")
    distance.axhline(SAME, color="gray", linewidth=0.8, linestyle=":")
    distance.set(title="Distance from 01's loss: below the dotted line it is rounding")
    distance.set(xlabel="optimizer step", ylabel="|difference| (0 drawn as 1e-9)", yscale="log")

    colors = [color_of[name] for name in names]
    speeds = [row["samples_per_second"] for row in rows.values()]
    texts = [f" {each / speeds[0]:.2f}" for each in speeds]
    speed.bar_label(speed.barh(names, speeds, color=colors), texts)
    speed.invert_yaxis()
    title = f"Throughput, all ranks together; beside it: times {names[0]}"
    speed.set(title=title, xlabel="samples/s (median step)", xmargin=0.1)
    stages = results["memory"]["stages"]
    held = {key.replace(" ", "\n"): stage["held"] for key, stage in stages.items()}
    kinds = dict(list(process_memory.STYLES.items())[:-1])  # without what is there for a moment
    process_memory.stack(memory, held, styles=kinds)
    memory.set_title("What each process holds")
    process_memory.stack(copies, held, styles=dict(list(kinds.items())[:COPIES]))
    copies.set(title="Of it: the copies of the model", ylabel="")
    process_memory.legend(copies, kinds, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in parts.values():
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def tabulate_rows(results: dict, style: str) -> str:
    rows = results["rows"]
    first, stages = next(iter(rows.values())), results["memory"]["stages"]
    headers = ["stage", "global batch", "train loss", "test accuracy", "samples/s"]
    headers += [f"times {next(iter(rows))[:2]}", "step ms (quartiles)", "MiB of tensors"]
    table = []
    for row in (row for row in ROWS if row.label in rows):
        got = rows[row.label]
        low, high = got["step_ms_quartiles"]
        line = [
            row.label,
            f"{got['global_batch'] // got['local_batch']} × {got['local_batch']}",
            f"{got['train_loss']:.4f}",
            f"{got['test_accuracy']:.2%}",
            f"{got['samples_per_second']:,.0f}",
            f"{got['samples_per_second'] / first['samples_per_second']:.2f}",
            f"{got['step_ms']:.1f} ({low:.1f} to {high:.1f})",
            " + ".join(f"{sum(each.values()) / 2**20:.1f}" for each in stages[row.job]["held"]),
        ]
        table.append(line)
    right = ("left", *["right"] * (len(headers) - 1))
    return tabulate(table, headers, style, colalign=right, disable_numparse=True)


def report(rows: list[Row], results: dict, args: Namespace, seconds: float) -> str:
    got = rows[0].run.summary
    lines = [
        f"# The tour: {args.model} on {args.dataset}, {args.ranks} ranks",
        "",
        f"Measured on {results['date']} in {seconds:.0f} s: {results['hardware']}, "
        f"{got['device']}, torch {got['torch']}, Python {results['python']}. "
        f"{args.epochs} epochs, global batch {args.batch_size}, one run of each. "
        "Each process has one thread, except in the row with all cores.",
        "",
        tabulate_rows(results, "github"),
        "",
        "Global batch: the number of processes or copies of the model × the local batch. "
        f"samples/s: from the median step. times {rows[0].key[:2]}: speed, {rows[0].key[:2]} = 1. "
        "MiB of tensors: what each process or copy holds at the end of forward, without "
        "PyTorch itself.",
        "",
        "![loss curves, speed and memory](tour.png)",
        "",
        "## Why each row is faster or slower than the one before",
        "",
        *(f"- **{b.label}**: {explain_speed(b, a)}" for a, b in pairs(rows)),
        "",
    ]
    if rows[0].key == "01":
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
        "hardware": chapter("05", "machine").hardware(device, args.ranks),
        "python": platform.python_version(),
        "rows": {row.label: row.run.summary for row in rows},
        "losses": {row.label: row.run.losses() for row in rows},  # of every step
        "memory": count_memory(rows, args),
    }
    text = report(rows, results, args, time.perf_counter() - started)
    (args.run_dir / "report.md").write_text(text)
    draw(results).savefig(args.run_dir / "tour.png", dpi=110)
    (args.run_dir / "tour.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{tabulate_rows(results, 'simple')}\n\nwrote {args.run_dir}/report.md and tour.png")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
