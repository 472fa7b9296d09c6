"""Run each stage once, as a reader would, and collect what the runs leave for the tour."""

import os
import sys
from argparse import Namespace
from statistics import quantiles

from tqdm import tqdm

import peak
from benchmarks.measure.memory import count_in_stages
from benchmarks.measure.stage_runs import StageRun, run_command, time_without_messages
from benchmarks.result_files import Results, provenance
from benchmarks.variants import VARIANTS, Layout, command_of
from common.bar import progress_bar
from common.data import load_dataset
from common.options import make_parser

KEYS = ("01", "01-cores", "02", "03", "04", "04-shm", "05", "05-shm", "05-bf16")


def measure_tour(args: Namespace) -> Results:
    """Run the tour; args: its flags, with the number of `ranks`."""
    origin = provenance(args.device, command="python benchmarks/tour.py")
    keys = [key for key in KEYS if VARIANTS[key].stage in args.stages]
    keys = [key for key in keys if not VARIANTS[key].why_not_on(args.device)]
    runs = {key: run(key, args) for key in progress_bar("tour", keys, unit="row")}
    with progress_bar("counting memory"):
        held = count_memory(keys, args)
    rows: dict[str, Results] = {
        key: {
            "label": VARIANTS[key].label,
            "summary": runs[key].summary,
            "losses": runs[key].losses(),  # one for each step
            "held": held[VARIANTS[key].memory_key]["held"],
        }
        for key in keys
    }
    on_ranks = [rows[key] for key in keys if VARIANTS[key].layout is Layout.RANKS]
    ceiling = [time_ceiling(args)] if on_ranks and args.ranks > 1 else []
    if ceiling:
        most = ceiling[0]["summary"]["samples_per_second"]
        for row in (*on_ranks, *ceiling):
            row["share"] = round(row["summary"]["samples_per_second"] / most, 4)
    settings = ("dataset", "model", "device", "epochs", "ranks")
    return {
        "provenance": origin,
        **{name: getattr(args, name) for name in settings},
        "global_batch": args.batch_size,
        "epoch_steps": sum(line["epoch"] == 0 for line in runs[keys[0]].metrics),
        "rows": rows,
        "ceiling": ceiling,
    }


def flags_of(args: Namespace, *left_out: str) -> list[str]:
    """List the flags that all stages share, where they differ from a stage's default."""
    flags = []
    for name, default in vars(make_parser("", "").parse_args([])).items():
        value = getattr(args, name)
        if value != default and name not in ("stage", "run_dir", *left_out):
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def run(key: str, args: Namespace) -> StageRun:
    """Run a stage, show what it prints, and read what it leaves behind."""
    variant = VARIANTS[key]
    command = [*command_of(key, args.ranks, args.device), *flags_of(args)]
    with tqdm.external_write_mode():
        print(f"\n{variant.label}: python {' '.join(command)}", flush=True)
    threads = (os.cpu_count() or 1) if variant.all_cores else 1
    try:
        return run_command(command, args.run_dir / key, threads, show=True)
    except SystemExit as end:
        with tqdm.external_write_mode():
            print(f"error: {variant.label} ended with status {end.code}", file=sys.stderr)
        raise


def time_ceiling(args: Namespace) -> Results:
    """Time the ceiling: as fast as the ranks would be if they never talked."""
    local_batch, label = args.batch_size // args.ranks, VARIANTS["ceiling"].title(args.ranks)
    command = " ".join(command_of("ceiling", args.ranks))
    print(f"\n{label}: {args.ranks} × python {command} --batch-size {local_batch}", flush=True)
    flags = flags_of(args, "batch_size", "epochs", "max_steps")
    with progress_bar("ceiling"):
        low, median, high = quantiles(time_without_messages(args.ranks, local_batch, *flags))
    summary = {
        "step_ms": round(1000 * median, 4),
        "step_ms_quartiles": [round(1000 * low, 4), round(1000 * high, 4)],
        "samples_per_second": round(args.batch_size / median, 1),
    }
    return {"label": label, "summary": summary}


def count_memory(keys: list[str], args: Namespace) -> Results:
    """Count the bytes of tensors by kind that each process or replica holds after the loss."""
    train_set, _ = load_dataset(args)
    image, _ = train_set[0]  # (C, H, W)
    optimizer, classes = "momentum" if args.momentum else "sgd", len(train_set.classes)
    plan = peak.Plan(args.model, image.shape[-1], optimizer, args.device, image.shape[0], classes)
    jobs = dict.fromkeys(VARIANTS[key].memory_key for key in keys)
    return count_in_stages(jobs, plan, args.batch_size, args.ranks)
