"""Samples a second of every stage and every reducer, timed in turns in one run.

    python benchmarks/stages.py

Each variant is set up by its stage's own main and trains on the digits with its own train_epoch:
what is timed is what a reader reads, loading the data included, evaluation and files left out. All
live in the same ranks, one thread each, with the same network, global batch and optimizer, and take
turns epoch by epoch (timing.py). Stages 01 and 02 are one process: rank 0, while the others wait.

The network is net-bn, not net: without BatchNorm, SyncBatchNorm of stage 05 would have nothing to
do. So 05 is timed doing more than 04: it computes what one process computes, and 04 does not.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.axes import Axes
from tabulate import tabulate
from torch.optim import SGD

from common.options import Parser, cut_batch, number, usage_errors_exit
from common.record import Recorder

from timing import (
    ROOT,
    SAME,
    add_device,
    chapter,
    interleave,
    of_the_slowest,
    provenance,
    require_device,
    save,
    summarize,
)

RANKS, MODEL, BATCH = 2, "net-bn", 120  # BATCH: the global one
ROUNDS, BRIEF_ROUNDS = 31, 11
BASE = "01, 1 thread"

start = chapter("03", "ranks").start
REDUCERS = chapter("03", "reducers").REDUCERS


@dataclass(frozen=True)
class Variant:
    """What a reader would type: a stage and its flags; and what else makes a difference."""

    stage: str
    flags: tuple[str, ...] = ()
    threads: int = 1
    reducer: str = ""  # of stage 03, in place of its own average_gradients

    @property
    def alone(self) -> bool:
        """Whether one process does everything."""
        return self.stage in ("01", "02")


def variants(cores: int) -> dict[str, Variant]:
    """All that can be compared; the rival of two ranks is one process with as many threads."""
    by_reducer = {f"03, {name}": Variant("03", reducer=name) for name in REDUCERS}
    return {
        BASE: Variant("01"),
        "01, all cores": Variant("01", threads=cores),
        "02 DataParallel": Variant("02"),
        "03 as in train.py": Variant("03"),
        **by_reducer,
        "04 DDP": Variant("04"),
        "05 DDP, SyncBN": Variant("05"),
        "05, no SyncBN": Variant("05", ("--no-sync-bn",)),
        "05, bf16": Variant("05", ("--amp", "bf16")),
    }


def choose(device: str, cores: int) -> tuple[dict[str, Variant], dict[str, str]]:
    """The variants that this machine can show, and why each other one is left out."""
    skipped = {}
    if device == "cuda":
        skipped["03, shared-memory"] = "its gradients must lie in main memory"
        skipped["01, all cores"] = "the threads of the CPU do not compute"
    elif cores == 1:
        skipped["01, all cores"] = "there is one core"
    return {n: v for n, v in variants(cores).items() if n not in skipped}, skipped


@cache
def program(stage: str) -> ModuleType:
    """The train.py of a stage as a module."""
    sys.modules.pop("train", None)  # that of another stage
    return chapter(stage, "train")


class FirstEpoch(Exception):  # noqa: N818, it is no error
    """Raised where main would train its first epoch: the variables of main, what it hands over."""


def set_up(module: ModuleType, rank: int, size: int, flags: Iterable[str]) -> tuple[dict, tuple]:
    """Run a stage's own main up to its first epoch, in a rank that has joined already."""

    def stop(*arguments: object) -> None:
        raise FirstEpoch(dict(sys._getframe(1).f_locals), arguments)

    def record(args: Namespace, optimizer: SGD, start: dict, local_batch: int, *_: int) -> Recorder:
        return Recorder(args, optimizer, start, local_batch, rank=1)  # only rank 0's writes files

    def spawn(train: Callable, args: tuple, nprocs: int) -> None:
        train(rank, *args)

    replaced = {"train_epoch": stop, "Recorder": record, "init_distributed": lambda *_: None}
    replaced["read_launcher"] = lambda: [rank, rank, size, size]
    with (
        mock.patch.dict(vars(module), replaced),
        mock.patch.multiple(dist, TCPStore=mock.DEFAULT, init_process_group=mock.DEFAULT),
        mock.patch.object(mp, "spawn", spawn),
        mock.patch.object(sys, "argv", ["train.py", *flags]),
    ):
        try:
            module.main()
        except FirstEpoch as reached:
            variables, arguments = reached.args
            return variables, arguments
    raise RuntimeError(f"{module.__file__} has nothing to train")


class Training:
    """A variant as its stage's own main sets it up; call it to train for an epoch.

    Every rank must make one, unless the variant is alone: DDP and the reducers send the weights.
    """

    def __init__(self, variant: Variant, *flags: str) -> None:
        self.variant, self.program = variant, program(variant.stage)
        rank, size = (0, 1) if variant.alone else (dist.get_rank(), dist.get_world_size())
        if variant.stage == "03":
            flags += (f"--world-size={size}",)
        made, arguments = set_up(self.program, rank, size, [*variant.flags, *flags])
        self.model, self.loader, self.recorder = made["model"], made["loader"], made["recorder"]
        self.sampler, self.generator = made["sampler"], made.get("generator")
        self.parallel, _, *self.more = arguments
        self.replaced = {}
        if variant.reducer:
            reducer = REDUCERS[variant.reducer](self.model)
            self.replaced["average_gradients"] = lambda model: reducer.finish()

    @property
    def steps(self) -> int:
        """Of one epoch."""
        return len(self.loader)

    def __call__(self, steps: int | None = None) -> None:
        """Train from the start of an epoch on; for so many steps, if not to its end."""
        if self.variant.alone and dist.get_rank() > 0:
            return
        epoch, self.recorder.epoch_step = self.recorder.epoch, 0
        if self.generator:
            self.generator.manual_seed(self.recorder.args.seed + epoch)
        else:
            self.sampler.set_epoch(epoch)
        batches = self.recorder.timed(islice(self.loader, steps), self.steps)
        torch.set_num_threads(self.variant.threads)
        with mock.patch.dict(vars(self.program), self.replaced):
            self.program.train_epoch(self.parallel, batches, *self.more)
        torch.set_num_threads(1)


def waiting_cpu_share(work: Callable[[], object]) -> float:
    """Of a rank that waits at a barrier while rank 0 works alone: CPU time / time; the largest."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    if dist.get_rank() == 0:
        work()
    dist.barrier()
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    [largest] = of_the_slowest({"": [share if dist.get_rank() else 0.0]})[""]
    return round(largest, 4)


def measure_on_ranks(names: list[str], cores: int, rounds: int, flags: list[str]) -> Any:
    """What each rank does."""
    torch.set_default_device("cpu")  # data sets are read there
    known = variants(cores)
    trainings = {name: Training(known[name], *flags) for name in names}
    steps = {name: training.steps for name, training in trainings.items()}
    times = interleave(trainings, rounds, 1, warm_up=1, meet=dist.barrier)  # 1: an epoch
    times = of_the_slowest(times)  # of a stage on rank 0 alone: its own
    share = waiting_cpu_share(trainings[BASE])
    a_step = {name: [s / steps.get(name, steps[BASE]) for s in t] for name, t in times.items()}
    return {"rows": summarize(a_step), "steps": steps, "waiting_cpu_share": share}


def measure(
    rounds: int = ROUNDS, device: str = "cpu", ranks: int = RANKS, names: Iterable[str] = ()
) -> dict[str, Any]:
    """Time variants; provenance, settings, and of each variant its step and samples a second.

    rounds: epochs of each variant that count. names: of variants besides 01, if not all.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks' replica threads of 02 read it
    gpu, cores = device == "cuda", os.cpu_count() or 1
    cut_batch(BATCH, ranks)
    chosen, skipped = choose(device, cores)
    if names:
        chosen = {name: v for name, v in chosen.items() if name in (BASE, *names)}
    flags = [f"--model={MODEL}", f"--batch-size={BATCH}", f"--data-dir={ROOT / 'data'}"]
    where = provenance(device, world_size=ranks, rounds=rounds)  # before there is load
    arguments = list(chosen), cores, rounds, [*flags, f"--device={device}"]
    found, *_ = start(ranks, measure_on_ranks, *arguments, device=device)
    rows = found["rows"]
    for name, row in rows.items():
        row["samples_per_second"] = round(BATCH / row["step_ms"] * 1000, 1)
        row["threads"] = chosen[name].threads if name in chosen else 1
    gpus = torch.cuda.device_count() if gpu else 0
    return {
        "provenance": where,
        "dataset": "digits",
        "model": MODEL,
        "global_batch": BATCH,
        "ranks": ranks,
        "cores": cores,
        "link": f"gloo, {ranks} ranks on {gpus} GPUs" if gpu else f"gloo, {ranks} ranks on the CPU",
        "steps_an_epoch": found["steps"][BASE],
        "waiting_cpu_share": found["waiting_cpu_share"],
        "skipped": skipped,
        "variants": rows,
    }


# Okabe and Ito's colours, one a stage; and hatches, for those who cannot tell these apart.
LOOKS = {
    "01": ("#999999", ""),
    "02": ("#E69F00", "//"),
    "03": ("#56B4E9", "\\\\"),
    "04": ("#009E73", "xx"),
    "05": ("#CC79A7", ".."),
}


def draw(results: dict[str, Any], axes: Axes) -> None:
    """A bar of samples a second for each variant, with the interval of its ratio to 01."""
    rows = {name: row for name, row in results["variants"].items() if name != SAME}
    base = rows[BASE]["samples_per_second"]
    for place, (name, row) in enumerate(rows.items()):
        colour, hatch = LOOKS[name[:2]]
        high, low = (base / end for end in row["ratio_interval"])
        middle = base / row["ratio"]
        axes.barh(place, middle, color=colour, hatch=hatch, edgecolor="white")
        ends = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.errorbar(middle, place, xerr=ends, color="black", capsize=2)
        axes.text(high + 0.02 * base, place, f" {1 / row['ratio']:.2f}", va="center", fontsize=8)
    axes.axvline(base, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(base / row["ratio_interval"][0] for row in rows.values()))
    axes.set(xlabel="samples/s, all ranks together; beside it: times 01")
    axes.set_title(f"{results['provenance']['hardware']}\n{results['link']}", fontsize=10)


def report(results: dict[str, Any]) -> str:
    """All variants as text."""
    table = [
        (
            name,
            f"{row['samples_per_second']:,.0f}",
            f"{row['step_ms']:.2f}",
            f"{1 / row['ratio']:.2f}",
            "{1:.2f} to {0:.2f}".format(*(1 / end for end in row["ratio_interval"])),
        )
        for name, row in results["variants"].items()
    ]
    heads = ("variant", "samples/s", "step, ms", "times 01", "95 % interval")
    return tabulate(table, heads, disable_numparse=True)


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--brief", action="store_true", help=f"{BRIEF_ROUNDS} rounds instead of {ROUNDS}")
    add("--rounds", type=number(int, 1), metavar="N", help="epochs of each variant that count")
    add("--out", type=Path, metavar="FILE", help="write what was measured there, as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw it there, as .png")
    add_device(parser, "all ranks share the GPUs, by way of gloo")
    add("--ranks", default=RANKS, type=number(int, 2), metavar="N", help="of stages 03 to 05")
    args = parser.parse_args()
    require_device(args.device)
    rounds = args.rounds or (BRIEF_ROUNDS if args.brief else ROUNDS)
    results = measure(rounds, args.device, args.ranks)
    print(f"{results['model']}, global batch {BATCH}, {results['link']}\n{report(results)}")
    print(f"a rank that waits uses {results['waiting_cpu_share']:.1%} of a core")
    for what, why in results["skipped"].items():
        print(f"left out: {what}: {why}")
    if args.out:
        save(args.out, results)
    if args.picture:
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        draw(results, axes)
        figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
