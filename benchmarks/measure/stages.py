"""The stages' own programs, started in turns: their speeds, their timelines, and survive's cost.

Each run is a process that starts, trains on the digits and ends. A step is the median (for survive,
where only some steps vote, the mean) of the steps after the first epoch, by its metrics.jsonl: with
loading, without evaluation and files. The network is net-bn: without BatchNorm, SyncBatchNorm of
stage 05 would have nothing to do.
"""

import math
import os
from collections.abc import Callable, Collection
from functools import partial
from statistics import fmean, median

import torch

from benchmarks.measure.recordings import WARM_UP, record_stages
from benchmarks.measure.sections import section
from benchmarks.measure.stage_runs import run_quietly, time_without_messages
from benchmarks.measure.timing import AA, Effort, interleave_runs, ratio_to, summarize
from benchmarks.result_files import Results
from benchmarks.variants import STAGES, VARIANTS, Layout

GLOBAL_BATCH = 120
CEILING = "ceiling"
KEYS = tuple(key for key in VARIANTS if key != "survive")


def time_run(average: Callable, key: str, ranks: int, device: str, *flags: str) -> float:
    threads = (os.cpu_count() or 1) if VARIANTS[key].all_cores else 1
    return average(run_quietly(key, ranks, device, *flags, threads=threads).seconds())


def time_run_without_messages(ranks: int, *flags: str) -> float:
    """Measure the seconds in which the ranks together take a global batch of samples."""
    return median(time_without_messages(ranks, GLOBAL_BATCH // ranks, *flags))


def or_nan(run: Callable[[], float]) -> float:
    """Return a run's seconds, or nan if it failed; the run has printed why, and others go on."""
    try:
        return run()
    except SystemExit:
        return math.nan


@section("stages", seconds_on_gpu=150)
def measure_stages(effort: Effort, keys: Collection[str] = KEYS) -> Results:
    """Measure each stage's speed, as a multiple of 01's and as a share of the ceiling."""
    cores, on_gpu = os.cpu_count() or 1, effort.device == "cuda"
    ranks = max(2, torch.cuda.device_count() if on_gpu else 0)
    epochs, rounds = (2, 1) if effort.quick else (6, min(7, effort.rounds))
    reasons = {key: VARIANTS[key].why_not_on(effort.device) for key in keys}
    model, device = "--model=net-bn", f"--device={effort.device}"
    variants: dict[str, Callable[[], float]] = {}
    for key in (key for key in keys if not reasons[key]):
        if VARIANTS[key].layout is Layout.APART:
            variants[key] = partial(time_run_without_messages, ranks, model, device)
        else:
            flags = (model, f"--batch-size={GLOBAL_BATCH}", f"--epochs={epochs}")
            variants[key] = partial(time_run, median, key, ranks, effort.device, *flags)
    times = interleave_runs({key: partial(or_nan, run) for key, run in variants.items()}, rounds)
    failed = [key for key, seconds in times.items() if any(map(math.isnan, seconds))]
    if {next(iter(times)), AA} & {*failed}:  # the other variants are compared with it
        raise SystemExit(1)
    for key in failed:
        reasons[key] = "a run of it failed"
        del times[key]
    rows = summarize(times)
    for key, row in rows.items():
        row["samples_per_second"] = round(GLOBAL_BATCH / row["step_ms"] * 1000, 1)
        row["label"] = AA if key == AA else VARIANTS[key].title(ranks)
        if key != AA and CEILING in times and VARIANTS[key].layout is not Layout.ONE:
            row["share"], row["share_interval"] = ratio_to(times[key], times[CEILING])
    about = {"cores": cores, "ranks": ranks, "rounds": rounds, "dataset": "digits"}
    about |= {"model": "net-bn", "global_batch": GLOBAL_BATCH}
    skipped = {VARIANTS[key].title(ranks): reason for key, reason in reasons.items() if reason}
    return {**about, "skipped": skipped, "variants": rows}


@section("timeline")
def measure_timeline(effort: Effort) -> Results:
    """Record what a step of each stage is spent on, for the pictures of the pages."""
    results = Results()
    recorded = {"net-bn": ([*STAGES], 65), "resnet18": (["03", "04"], 20)}
    for model, (stages, steps) in recorded.items():
        if effort.quick:
            stages, steps = stages[-1:], WARM_UP + 2
        results[model] = record_stages(stages, model, steps, turns=min(3, effort.rounds))
    return results


@section("survive")
def measure_survive(effort: Effort) -> Results:
    rounds, epochs = min(41, effort.rounds), 2 if effort.quick else 11
    flags = "--model=net", f"--batch-size={GLOBAL_BATCH}", f"--epochs={epochs}"
    variants = {key: partial(time_run, fmean, key, 2, "cpu", *flags) for key in ("05", "survive")}
    about = {"model": "net", "global_batch": GLOBAL_BATCH, "rounds": rounds, "epochs": epochs}
    return {**about, "variants": summarize(interleave_runs(variants, rounds))}
