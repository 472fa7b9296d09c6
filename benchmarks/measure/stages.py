"""The stages' own programs in turns: their speeds, their timelines, and survive's cost.

All programs train on the digits, each in processes of its own, which take turns. A step is the
median of a turn (for survive, where only some steps vote, the mean), by the program's file:
with loading, without evaluation and files. Every program starts several times, because where its
processes lie in memory and on the cores is luck. The network is net-bn: without BatchNorm,
SyncBatchNorm of stage 05 would have nothing to do.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch

from benchmarks.measure.recordings import WARM_UP, record_stages
from benchmarks.measure.sections import section
from benchmarks.measure.timing import AA, Effort, Times, ratio_to, summarize
from benchmarks.measure.turns import Plan, take_turns, warmed_up
from benchmarks.result_files import Results
from benchmarks.variants import STAGES, VARIANTS, Layout
from common.data import load_dataset
from local_ranks.chapters import ROOT
from local_ranks.train_stage import options

GLOBAL_BATCH = 120
CEILING = "ceiling"
KEYS = tuple(key for key in VARIANTS if key != "survive")
STARTS, ROUNDS = 3, 9  # of each start


def time_in_turns(
    keys: Sequence[str],
    model: str,
    ranks: int,
    effort: Effort,
    average: Callable[[list[float]], float] = median,
) -> tuple[Times, dict[str, list[int | None]]]:
    """Time programs in turns, the first of them twice. One that fails is left out.

    Returns also the page faults of each program in a step, for each of its starts.
    """
    train_set, _ = load_dataset(options())
    plan = Plan(len(train_set) // GLOBAL_BATCH, min(ROUNDS, effort.rounds))
    names = {key: key for key in keys} | {AA: keys[0]}
    times: Times = {}
    faults: dict[str, list[int | None]] = {}
    for _ in range(STARTS if effort.rounds > ROUNDS else 1):
        runs = {}
        for name, key in names.items():
            apart = VARIANTS[key].layout is Layout.APART
            flags = [f"--model={model}", f"--batch-size={GLOBAL_BATCH // (ranks if apart else 1)}"]
            flags += [f"--device={effort.device}", f"--data-dir={ROOT / 'data'}"]
            runs[name] = key, flags if apart else [*flags, f"--epochs={plan.epochs}"]
        with TemporaryDirectory() as folder:
            started = warmed_up(runs, ranks, plan.epoch_steps, Path(folder), may_fail=keys[1:])
            with started as programs:
                found = take_turns(programs, plan, average)
                for name, program in programs.items():
                    faults.setdefault(name, []).append(program.page_faults_of_a_step())
        times = {name: times.get(name, []) + seconds for name, seconds in found.items()}
        names = {name: names[name] for name in found}
    return times, faults


@section("stages", seconds_on_gpu=150)
def measure_stages(effort: Effort, keys: Sequence[str] = KEYS) -> Results:
    """Measure each stage's speed, as a multiple of 01's and as a share of the ceiling."""
    ranks = max(2, torch.cuda.device_count() if effort.device == "cuda" else 0)
    reasons = {key: VARIANTS[key].why_not_on(effort.device) for key in keys}
    started = [key for key in keys if not reasons[key]]
    times, faults = time_in_turns(started, "net-bn", ranks, effort)
    reasons |= {key: "a run of it failed" for key in keys if not reasons[key] and key not in times}
    rows = summarize(times)
    for key, row in rows.items():
        row["samples_per_second"] = round(GLOBAL_BATCH / row["step_ms"] * 1000, 1)
        row["page_faults_of_a_step"] = faults[key]
        row["label"] = AA if key == AA else VARIANTS[key].title(ranks)
        if key != AA and CEILING in times and VARIANTS[key].layout is not Layout.ONE:
            row["share"], row["share_interval"] = ratio_to(times[key], times[CEILING])
    about = {"cores": os.cpu_count(), "ranks": ranks, "rounds": len(times[AA]), "dataset": "digits"}
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


def mean_without_first_steps(seconds: list[float]) -> float:
    """Average the steps of turns, each of which begins where the program has stood still."""
    return fmean(seconds[1:])


@section("survive")
def measure_survive(effort: Effort) -> Results:
    """Compare a step of survive with one of stage 05."""
    times, _ = time_in_turns(("05", "survive"), "net", 2, effort, mean_without_first_steps)
    about = {"model": "net", "global_batch": GLOBAL_BATCH, "rounds": len(times[AA])}
    return {**about, "variants": summarize(times)}
