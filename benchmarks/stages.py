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

from common.data import local_batch_size
from plots import COLORS, HATCHES, Axes, speed_bars
from run_stage import run_quietly
from timing import SAME, Effort, Results, summarize, take_turns

BATCH, BASE = 120, "01, 1 thread"  # the global batch; the baseline of the others
VARIANTS: dict[str, tuple[str, ...]] = {  # the stage as run_stage.py names it, and its flags
    BASE: ("01",),
    "01, all cores": ("01",),
    "02 DataParallel": ("02",),
    "03 by hand": ("03",),
    "04 DDP": ("04",),
    "04 over shm": ("04-shm",),
    "05 DDP, SyncBN": ("05",),
    "05 over shm": ("05-shm",),
    "05, no SyncBN": ("05", "--no-sync-bn"),
    "05, bf16": ("05-bf16",),
}


def time_run(average: Callable, ranks: int, key: str, *flags: str, threads: int = 1) -> float:
    return average(run_quietly(key, ranks, *flags, threads=threads).seconds())


def measure_stages(effort: Effort, names: Iterable[str] = tuple(VARIANTS)) -> Results:
    cores, on_gpu = os.cpu_count() or 1, effort.device == "cuda"
    ranks = effort.ranks or max(2, torch.cuda.device_count() * on_gpu)
    local_batch_size(BATCH, ranks)  # a wrong number of ranks ends here
    skipped = {"01, all cores": "there is one core"} if cores == 1 else {}
    if on_gpu:
        skipped = dict.fromkeys(("04 over shm", "05 over shm"), "CPU only")
        skipped["01, all cores"] = "the threads of the CPU do not compute"
    names = list(names)[:: 5 if effort.quick else 1]
    epochs, rounds = (2, 1) if effort.quick else (6, 3 if effort.brief else min(9, effort.rounds))
    common = (f"--model=net-bn --batch-size={BATCH}", f"--epochs={epochs} --device={effort.device}")
    flags = " ".join(common).split()
    variants = {}
    for name in (name for name in names if name not in skipped):
        key, *own = VARIANTS[name]
        threads = cores if name == "01, all cores" else 1
        variants[name] = partial(time_run, median, ranks, key, *own, *flags, threads=threads)
    rows = summarize(take_turns(variants, rounds))
    for row in rows.values():
        row["samples_per_second"] = round(BATCH / row["step_ms"] * 1000, 1)
    link = f"{ranks} ranks on {'GPUs' if on_gpu else 'the CPU'}"
    about = {"provenance": {"world_size": ranks, "rounds": rounds}, "link": link, "cores": cores}
    about |= {"dataset": "digits", "model": "net-bn", "global_batch": BATCH, "ranks": ranks}
    return {**about, "skipped": skipped, "variants": rows}


def draw(results: Results, axes: Axes) -> None:
    rows = {name: row for name, row in results["variants"].items() if name != SAME}
    looks = [(COLORS[int(name[:2])], HATCHES[int(name[:2])]) for name in rows]
    texts = [f"{1 / row['ratio']:.2f}" for row in rows.values()]
    speed_bars(axes, rows, "samples_per_second", looks, texts)
    axes.axvline(rows[BASE]["samples_per_second"], color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="samples/s, all ranks together; beside it: times 01")
    axes.set_title(f"{results['provenance']['hardware']}\n{results['link']}", fontsize=10)


def measure_survive(effort: Effort) -> Results:
    rounds, epochs = min(41, effort.rounds), 2 if effort.quick else 11
    flags = f"--model=net --batch-size=120 --epochs={epochs} --device=cpu".split()
    programs = {name: partial(time_run, fmean, 2, name, *flags) for name in ("05", "survive")}
    about = {"model": "net", "global_batch": 120, "rounds": rounds, "epochs": epochs}
    about |= {"provenance": {"world_size": 2, "threads_a_rank": 1}}
    return {**about, "variants": summarize(take_turns(programs, rounds))}
