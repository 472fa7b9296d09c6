"""Samples per second of every stage and every reducer, timed in turns in one run.

Each variant is set up by its stage's own main and trains on the digits with its own train_epoch:
the timed code is the reader's, without evaluation and files. All live in the same ranks of
one thread each; 01 and 02 run on rank 0 while the others wait. The network is net-bn: without
BatchNorm, SyncBatchNorm of stage 05 would have nothing to do.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.optim import SGD

import shm  # noqa: F401
from common.options import cut_batch
from common.record import Recorder
from plots import COLORS, HATCHES, Axes, speed_bars
from timing import ROOT, SAME, Effort, Results, chapter, interleave, summarize

BATCH, BASE = 120, "01, 1 thread"  # the global batch; the baseline of the others

start = chapter("03", "ranks").start
REDUCERS = chapter("03", "reducers").REDUCERS


@dataclass(frozen=True)
class Variant:
    stage: str
    flags: tuple[str, ...] = ()  # as a reader would type them
    threads: int = 1
    reducer: str = ""  # of stage 03, in place of its own average_gradients
    backend: str = ""

    @property
    def alone(self) -> bool:  # one process does everything
        return self.stage in ("01", "02")


def choose(device: str, cores: int) -> tuple[dict[str, Variant], dict[str, str]]:
    """The variants that this machine can show, and why each other one is left out."""
    found = {BASE: Variant("01"), "01, all cores": Variant("01", threads=cores)}  # 2 ranks' rival
    found |= {"02 DataParallel": Variant("02"), "03 as in train.py": Variant("03")}
    found |= {f"03, {name}": Variant("03", reducer=name) for name in REDUCERS}
    found |= {"04 DDP": Variant("04"), "04 over shm": Variant("04", backend="shm")}
    found |= {"05 DDP, SyncBN": Variant("05"), "05 over shm": Variant("05", backend="shm")}
    found["05, no SyncBN"] = Variant("05", ("--no-sync-bn",))
    found["05, bf16"] = Variant("05", ("--amp", "bf16"))
    skipped = {"01, all cores": "there is one core"} if cores == 1 else {}
    if device == "cuda":
        skipped |= dict.fromkeys(("03, shared-memory", "04 over shm", "05 over shm"), "CPU only")
        skipped["01, all cores"] = "the threads of the CPU do not compute"
    return {name: variant for name, variant in found.items() if name not in skipped}, skipped


group: Any = cache(lambda backend: dist.new_group(backend=backend))  # every rank must call it


@contextmanager
def over(backend: str) -> Iterator[None]:
    """In a process group of this backend; without one, in the ranks' own."""
    own = dist.group.WORLD
    dist.group.WORLD = group(backend) if backend else own
    try:
        yield
    finally:
        dist.group.WORLD = own


def set_up(module: ModuleType, rank: int, size: int, flags: Iterable[str]) -> tuple[dict, tuple]:
    """Run a stage's own main up to its first epoch: its variables, and train_epoch's arguments."""
    found: list[tuple[dict, tuple]] = []

    def stop(*arguments: object) -> None:
        found.append((dict(sys._getframe(1).f_locals), arguments))
        sys.exit()  # out of main

    def record(args: Namespace, optimizer: SGD, saved: dict, local_batch: int, *_: int) -> Recorder:
        return Recorder(args, optimizer, saved, local_batch, rank=1)  # only rank 0's writes files

    def pick_devices(device: torch.device, replicas: int) -> list[torch.device]:
        several = device.type == "cuda" and torch.cuda.device_count() > 1
        return [torch.device("cuda", i) if several else device for i in range(replicas)]

    replaced: dict[str, Callable] = {"train_epoch": stop, "Recorder": record}
    replaced |= {"pick_devices": pick_devices, "init_distributed": lambda *_: None}
    replaced["read_launcher"] = lambda: [rank, rank, size, size]
    with (
        mock.patch.dict(vars(module), replaced),
        mock.patch.multiple(dist, TCPStore=mock.DEFAULT, init_process_group=mock.DEFAULT),
        mock.patch.object(mp, "spawn", lambda train, args, nprocs: train(rank, *args)),
        mock.patch.object(sys, "argv", ["train.py", *flags]),
        suppress(SystemExit),
    ):
        module.main()
    return found[0]


class Training:
    """A variant as its stage's own main sets it up, on every rank; call it to train an epoch."""

    def __init__(self, variant: Variant, model: str, batch: int, device: str = "cpu") -> None:
        self.variant, self.program = variant, chapter(variant.stage, "train")
        rank, size = (0, 1) if variant.alone else (dist.get_rank(), dist.get_world_size())
        flags = [f"--model={model}", f"--batch-size={batch}", f"--data-dir={ROOT / 'data'}"]
        if part := {"02": "replicas", "03": "world-size"}.get(variant.stage):
            flags.append(f"--{part}={dist.get_world_size()}")
        nccl = device == "cuda" and variant.stage >= "04" and torch.cuda.device_count() >= size
        self.backend = "nccl" if nccl else variant.backend  # nccl as train.py takes it
        with over(self.backend):
            flags += [f"--device={device}", *variant.flags]
            made, arguments = set_up(self.program, rank, size, flags)
        self.model, self.loader, self.recorder = made["model"], made["loader"], made["recorder"]
        self.sampler, self.generator = made["sampler"], made.get("generator")
        self.parallel, _, *self.more = arguments
        self.replaced = {}
        if variant.reducer:
            reducer = REDUCERS[variant.reducer](self.model)
            self.replaced["average_gradients"] = lambda model: reducer.finish()

    def __call__(self, steps: int | None = None) -> None:
        """Train from the start of an epoch on; for so many steps, if not to its end."""
        if self.variant.alone and dist.get_rank() > 0:
            return
        epoch, self.recorder.epoch_step = self.recorder.epoch, 0
        if self.generator:
            self.generator.manual_seed(self.recorder.args.seed + epoch)
        else:
            self.sampler.set_epoch(epoch)
        batches = self.recorder.timed(islice(self.loader, steps), len(self.loader))
        torch.set_num_threads(self.variant.threads)
        replaced = mock.patch.dict(vars(self.program), self.replaced)
        with replaced, over(self.backend):
            self.program.train_epoch(self.parallel, batches, *self.more)
        torch.set_num_threads(1)


def on_ranks(variants: dict[str, Variant], rounds: int, device: str) -> Results:
    torch.set_default_device("cpu")  # data sets are read there
    trainings = {name: Training(each, "net-bn", BATCH, device) for name, each in variants.items()}
    few = 2 if rounds == 1 else None  # to see that it runs; otherwise, one call is an epoch
    steps = {name: few or len(training.loader) for name, training in trainings.items()}
    times = interleave({n: partial(t, few) for n, t in trainings.items()}, rounds, warm_up=1)
    steps[SAME] = steps[BASE]
    return summarize({name: [s / steps[name] for s in times[name]] for name in times})


def measure_stages(effort: Effort) -> Results:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks' replica threads of 02 read it
    cores, gpus = os.cpu_count() or 1, torch.cuda.device_count() * (effort.device == "cuda")
    ranks, rounds = effort.ranks or max(2, gpus), 7 if effort.brief else min(31, effort.rounds)
    cut_batch(BATCH, ranks)
    variants, skipped = choose(effort.device, cores)
    if effort.quick:
        variants = dict(list(variants.items())[::3])
    rows, *_ = start(ranks, on_ranks, variants, rounds, effort.device, device=effort.device)
    for row in rows.values():
        row["samples_per_second"] = round(BATCH / row["step_ms"] * 1000, 1)
    backend = "nccl (03: gloo)" if gpus >= ranks else "gloo"
    link = f"{backend}, {ranks} ranks on {f'{gpus} GPUs' if gpus else 'the CPU'}"
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
