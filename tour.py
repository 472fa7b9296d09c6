"""Run the five stages in order on this machine, compare them, and say what the picture shows.

    python tour.py
    python tour.py --ranks 3 --stages 01,05 --epochs 3

Every flag that all stages share is handed on to them.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from tabulate import tabulate

from common.options import UsageError, cut_batch, make_parser, number, usage_errors_exit

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "RANKS")
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7")  # Okabe and Ito
SAME = 1e-5  # two fp32 runs whose losses differ less over the first epoch do the same


@dataclass
class Row:
    """A stage with its flags; when it has run, its summary and the loss of every step."""

    key: str
    label: str
    command: tuple[str, ...]  # RANKS stands for their number
    summary: dict = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)

    def losses(self, epochs: int | None = None) -> list[float]:
        return [x["loss"] for x in self.metrics if epochs is None or x["epoch"] < epochs]


ROWS = (
    Row("01", "01 one process", ("01_single_gpu/train.py",)),
    Row("02", "02 DataParallel", ("02_data_parallel/train.py", "--replicas", "RANKS")),
    Row("03", "03 by hand", ("03_ddp_manual_allreduce/train.py", "--world-size", "RANKS")),
    Row("04", "04 DDP", (*TORCHRUN, "04_ddp_torchrun/train.py")),
    Row("05", "05 DDP, SyncBN", (*TORCHRUN, "05_amp_syncbn/train.py")),
    Row("05-bf16", "05 in bf16", (*TORCHRUN, "05_amp_syncbn/train.py", "--amp", "bf16")),
)


def parse_args() -> Namespace:
    parser = make_parser("tour", __doc__)
    parser.add_argument("--ranks", type=number(int, 1), metavar="N", help="None: every GPU, or 2")
    parser.add_argument("--stages", default="01,02,03,04,05", help="which to run, as 01,04")
    parser.set_defaults(model="net-bn", batch_size=None)
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
    cut_batch(args.batch_size, args.ranks)
    return args


def run(row: Row, args: Namespace, folder: Path, **env: str) -> None:
    """Run a stage as a reader would, show what it prints, and read what it leaves behind."""
    command = [part.replace("RANKS", str(args.ranks)) for part in row.command]
    if not Path("01_single_gpu").exists():  # started from another folder
        here = Path(__file__).parent
        command = [str(here / part) if part.endswith(".py") else part for part in command]
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    if row.key == "03" and args.ranks <= gpus:
        command += ["--backend", "nccl"]  # as 04 does by itself
    if args.ranks < gpus:  # 02 takes all GPUs that it sees
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(shown[: args.ranks])
    for name, default in vars(make_parser("", "").parse_args([])).items():
        value = getattr(args, name)
        if value != default and name not in ("stage", "run_dir"):
            command += [f"--{name.replace('_', '-')}", str(value)]
    print(f"\n{row.label}: python {' '.join(command)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, *command, f"--run-dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},  # one thread for each rank, and for 01
    )
    assert process.stdout
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
    if process.wait():
        print(f"error: {row.label} ended with status {process.returncode}", file=sys.stderr)
        raise SystemExit(process.returncode)
    row.summary = json.loads((folder / "summary.json").read_text())
    row.metrics = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def explain(row: Row, first: Row, args: Namespace) -> str:
    """One sentence: does this row repeat the first one's losses, how closely, and why."""
    pairs = zip(first.losses(epochs=1), row.losses(epochs=1), strict=True)
    gaps = [abs(a - b) for a, b in pairs]
    if not all(map(math.isfinite, gaps)):
        return "cannot be compared with 01: a loss is not finite."
    gap = max(gaps)
    if gap <= SAME:
        return f"repeats 01 (largest difference in the first epoch: {gap:.0e})."
    causes = []
    if row.key == "03":
        causes.append("its ranks own fixed shards, so that its batches hold other samples")
    if row.key in ("02", "03", "04") and args.ranks > 1 and args.model != "net":
        causes.append("BatchNorm takes its statistics from the local batch")
    if args.model == "net" and args.ranks > 1:
        causes.append("the parts of a batch get other dropout masks than the whole batch")
    if row.key == "05-bf16":
        causes.append("bf16 keeps 8 significant bits where fp32 keeps 24")
    if row.summary.get("device") == "cuda":
        causes.append("a GPU's convolutions are in TF32 if nothing else is said, with 11 bits")
    causes = causes or ["sums in another order are rounded otherwise, and steps amplify it"]
    return f"does not repeat 01 (largest difference in the first epoch: {gap:.2g}): " + "; ".join(
        causes
    )


def draw(results: dict) -> plt.Figure:
    """Loss curves, throughput and memory, of tour.json: the picture of the tour."""
    matplotlib.use("Agg")  # a file, no window
    rows: dict[str, dict] = results["rows"]
    first = next(iter(rows.values()))
    figure = plt.figure(figsize=(12, 6.5), layout="constrained")
    curves, speed, distance, memory = figure.subplots(2, 2, width_ratios=(1.4, 1)).flat
    names, colour_of = list(rows), dict(zip((row.label for row in ROWS), COLOURS, strict=True))
    of_01 = results["losses"].get(ROWS[0].label)
    for name, losses in results["losses"].items():
        steps = range(1, len(losses) + 1)
        (line,) = curves.plot(steps, losses, color=colour_of[name], label=name)
        if name == ROWS[0].label:  # wide and pale: what lies on it can still be seen
            line.set(linewidth=6, alpha=0.3)
        elif of_01:
            gaps = [max(abs(a - b), 1e-9) for a, b in zip(of_01, losses, strict=True)]
            distance.plot(steps, gaps, color=colour_of[name])
    curves.set(title=f"Training loss: {first['model']} on {first['dataset']}", yscale="log")
    curves.set(ylabel="loss of the global batch")
    curves.legend(ncols=2, fontsize="small")
    distance.axhline(SAME, color="grey", linewidth=0.8, linestyle=":")
    distance.set(title="Distance from 01's loss: below the dotted line it is rounding")
    distance.set(xlabel="optimiser step", ylabel="|difference| (0 drawn as 1e-9)", yscale="log")

    colours = [colour_of[name] for name in names]
    speed.barh(names, [row["samples_per_second"] for row in rows.values()], color=colours)
    speed.set(title="Throughput, all ranks together", xlabel="samples/s (median step)")
    for place, row in enumerate(rows.values()):
        peaks = [peak / 2**20 for peak in row["peak_memory_bytes"]]
        thickness = 0.8 / len(peaks)  # a bar for each process or GPU
        offsets = [place + thickness * (i - (len(peaks) - 1) / 2) for i in range(len(peaks))]
        memory.barh(offsets, peaks, height=thickness * 0.9, color=colours[place])
    unit = "GPU" if first["device"] == "cuda" else "process"
    memory.set(title=f"Peak memory of each {unit}", xlabel="MiB", yticks=range(len(rows)))
    memory.set_yticklabels(names)
    for axes in (speed, memory):
        axes.invert_yaxis()
    for axes in (curves, speed, distance, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def tabulate_rows(rows: list[Row], style: str) -> str:
    headers = ["stage", "global batch", "train loss", "test accuracy", "samples/s"]
    headers += ["step ms (quartiles)", "peak MiB"]
    table = []
    for row in rows:
        got = row.summary
        parts = got["global_batch"] // got["local_batch"]
        peaks = " + ".join(f"{peak / 2**20:,.0f}" for peak in got["peak_memory_bytes"])
        low, high = got["step_ms_quartiles"]
        table.append(
            (
                row.label,
                f"{parts} × {got['local_batch']}",
                f"{got['train_loss']:.4f}",
                f"{got['test_accuracy']:.2%}",
                f"{got['samples_per_second']:,.0f}",
                f"{got['step_ms']:.1f} ({low:.1f} to {high:.1f})",
                peaks,
            )
        )
    right = ("left", *["right"] * 6)
    return tabulate(table, headers, style, colalign=right, disable_numparse=True)


def report(rows: list[Row], args: Namespace, seconds: float, note: str) -> str:
    got = rows[0].summary
    memory = "torch.cuda.max_memory_allocated" if got["device"] == "cuda" else "peak resident set"
    lines = [
        f"# The tour: {args.model} on {args.dataset}, {args.ranks} ranks",
        "",
        f"Measured on {date.today()} in {seconds:.0f} s: {got['hardware']}, {got['device']}, torch "
        f"{got['torch']}, Python {platform.python_version()}. {args.epochs} epochs, global batch "
        f"{args.batch_size}, one run of each. {note}",
        "",
        tabulate_rows(rows, "github"),
        "",
        "The global batch is cut into replicas or ranks × local batch. samples/s: from the median "
        f"step of one run. Peak memory: {memory}, of each GPU or process.",
        "",
        "![loss curves, throughput and peak memory](tour.png)",
        "",
    ]
    if rows[0].key == "01":
        lines += ["## Which stages repeat 01, and why", ""]
        lines += [f"- **{row.label}** {explain(row, rows[0], args)}" for row in rows[1:]]
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    rows = [row for row in ROWS if row.key[:2] in args.stages]
    for row in rows:
        run(row, args, args.run_dir / row.key)
    note = ""
    if rows[0].key == "01" and rows[0].summary["device"] == "cpu":
        cores = os.cpu_count() or 1  # what one process makes of the machine: the fair rival
        whole = Row("01-threads", f"01 with {cores} threads", rows[0].command)
        run(whole, args, args.run_dir / whole.key, OMP_NUM_THREADS=str(cores))
        speed = whole.summary["samples_per_second"]
        note = f"OMP_NUM_THREADS=1; 01 with {cores} threads makes {speed:,.0f} samples/s."
    text = report(rows, args, time.perf_counter() - started, note)
    (args.run_dir / "report.md").write_text(text)
    results = {
        "date": str(date.today()),
        "python": platform.python_version(),
        "note": note,
        "rows": {row.label: row.summary for row in rows},
        "losses": {row.label: row.losses() for row in rows},  # of every step
    }
    draw(results).savefig(args.run_dir / "tour.png", dpi=110)
    (args.run_dir / "tour.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{tabulate_rows(rows, 'simple')}\n\nwrote {args.run_dir}/report.md and tour.png")


if __name__ == "__main__":
    with usage_errors_exit():
        main()
