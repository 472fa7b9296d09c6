"""The stages' own programs, started in turns: samples per second, and what survive/ adds to a step.

Each run is a process that starts, trains on the digits and ends. A step is the median (for survive,
where only some steps vote, the mean) of the steps after the first epoch, by its metrics.jsonl: with
loading, without evaluation and files. The network is net-bn: without BatchNorm, SyncBatchNorm of
stage 05 would have nothing to do.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean, median

import torch

from stage_runs import run_quietly
from timing import Effort, Results, summarize, take_turns

GLOBAL_BATCH = 120
BASELINE, ALL_CORES = "01, 1 thread", "01, all cores"
VARIANTS: dict[str, tuple[str, ...]] = {  # the stage as stage_runs.py names it, and its flags
    BASELINE: ("01",),
    ALL_CORES: ("01",),
    "02 DataParallel": ("02",),
    "03 by hand": ("03",),
    "04 DDP": ("04",),
    "04 over shm": ("04-shm",),
    "05 DDP, SyncBN": ("05",),
    "05 over shm": ("05-shm",),
    "05, no SyncBN": ("05", "--no-sync-bn"),
    "05, bf16": ("05-bf16",),
}


def time_run(average: Callable, ranks: int, stage: str, *flags: str, threads: int = 1) -> float:
    return average(run_quietly(stage, ranks, *flags, threads=threads).seconds())


def measure_stages(effort: Effort, names: Iterable[str] = tuple(VARIANTS)) -> Results:
    cores, on_gpu = os.cpu_count() or 1, effort.device == "cuda"
    ranks = max(2, torch.cuda.device_count() if on_gpu else 0)
    skipped = {ALL_CORES: "there is one core"} if cores == 1 else {}
    if on_gpu:
        skipped = dict.fromkeys(("04 over shm", "05 over shm"), "CPU only")
        skipped[ALL_CORES] = "the threads of the CPU do not compute"
    names = list(names)[::5] if effort.quick else list(names)
    epochs, rounds = (2, 1) if effort.quick else (6, min(9, effort.rounds))
    common = ["--model=net-bn", f"--batch-size={GLOBAL_BATCH}"]
    common += [f"--epochs={epochs}", f"--device={effort.device}"]
    variants = {}
    for name in (name for name in names if name not in skipped):
        stage, *flags = VARIANTS[name]
        threads = cores if name == ALL_CORES else 1
        variants[name] = partial(time_run, median, ranks, stage, *flags, *common, threads=threads)
    rows = summarize(take_turns(variants, rounds))
    for row in rows.values():
        row["samples_per_second"] = round(GLOBAL_BATCH / row["step_ms"] * 1000, 1)
    link = f"{ranks} ranks on {'GPUs' if on_gpu else 'the CPU'}"
    about = {"link": link, "cores": cores, "ranks": ranks, "rounds": rounds, "dataset": "digits"}
    about |= {"model": "net-bn", "global_batch": GLOBAL_BATCH}
    return {**about, "skipped": skipped, "variants": rows}


def measure_survive(effort: Effort) -> Results:
    rounds, epochs = min(41, effort.rounds), 2 if effort.quick else 11
    flags = "--model=net", f"--batch-size={GLOBAL_BATCH}", f"--epochs={epochs}", "--device=cpu"
    variants = {stage: partial(time_run, fmean, 2, stage, *flags) for stage in ("05", "survive")}
    about = {"model": "net", "global_batch": GLOBAL_BATCH, "rounds": rounds, "epochs": epochs}
    return {**about, "variants": summarize(take_turns(variants, rounds))}
