"""Run a stage as a reader would: its command in a process of its own, and the files that it leaves.

The tour shows what a stage prints, measure_stages.py repeats the runs in turns, and gpu.py lists
the commands.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from common.chapters import ROOT
from shm.cores import pin

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "RANKS")
STAGE_01, STAGE_04 = "01_single_gpu/train.py", "04_ddp_torchrun/train.py"
STAGE_05, SURVIVE = "05_amp_syncbn/train.py", "beyond/survive/train.py"
STAGES = ("01", "02", "03", "04", "05")  # of VARIANTS, as a reader runs them
MANY = 10**6  # epochs: more than anybody waits for


class Layout(Enum):
    """Which processes one run has."""

    ONE = "one process"
    RANKS = "several processes that average their gradients"
    APART = "as many processes that never talk"


@dataclass(frozen=True)
class Variant:
    """One way to run a stage, and what a table or a picture must know of it."""

    label: str  # RANKS stands for their number, here and in the command
    stage: str
    command: tuple[str, ...]  # after `python`
    layout: Layout = Layout.ONE
    all_cores: bool = False  # otherwise each process has one thread
    over_shm: bool = False
    bf16: bool = False

    def title(self, ranks: int) -> str:
        return self.label.replace("RANKS", str(ranks))

    @property
    def holds_as(self) -> str:
        """Where measure_memory.py counts the same tensors: threads and shm change nothing."""
        return "05-bf16" if self.bf16 else self.stage

    def why_not_on(self, device: str) -> str:
        """Why this machine cannot run it, or nothing."""
        if self.over_shm and (device == "cuda" or sys.platform != "linux"):
            return "shm is for CPUs and Linux"
        if self.all_cores and device == "cuda":
            return "the threads of the CPU do not compute"
        if self.all_cores and os.cpu_count() == 1:
            return "there is one core"
        return ""


def ranks_variant(label: str, stage: str, *command: str, **options: bool) -> Variant:
    return Variant(label, stage, command, Layout.RANKS, **options)


SHM = (*TORCHRUN, "-m", "shm")
VARIANTS = {
    "01": Variant("01 one process", "01", (STAGE_01,)),
    "01-cores": Variant("01 with all cores", "01", (STAGE_01,), all_cores=True),
    "ceiling": Variant("ceiling: RANKS processes that never talk", "01", (STAGE_01,), Layout.APART),
    "02": Variant("02 DataParallel", "02", ("02_data_parallel/train.py", "--replicas", "RANKS")),
    "03": ranks_variant(
        "03 by hand", "03", "03_ddp_manual_allreduce/train.py", "--world-size", "RANKS"
    ),
    "04": ranks_variant("04 DDP", "04", *TORCHRUN, STAGE_04),
    "04-shm": ranks_variant("04 over shm", "04", *SHM, STAGE_04, over_shm=True),
    "05": ranks_variant("05 DDP, SyncBN", "05", *TORCHRUN, STAGE_05),
    "05-shm": ranks_variant("05 over shm", "05", *SHM, STAGE_05, over_shm=True),
    "05-local-bn": ranks_variant("05, no SyncBN", "05", *TORCHRUN, STAGE_05, "--no-sync-bn"),
    "05-bf16": ranks_variant("05 in bf16", "05", *TORCHRUN, STAGE_05, "--amp", "bf16", bf16=True),
    "survive": ranks_variant("survive", "survive", *TORCHRUN, SURVIVE),
}


@dataclass(frozen=True)
class StageRun:
    """What a run left: summary.json, and the lines of metrics.jsonl, one for each step."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    def seconds(self) -> list[float]:
        """Of each step after the first epoch, in which a program warms up."""
        return [line["seconds"] for line in self.metrics if line["epoch"] > 0]


def command_of(key: str, ranks: int) -> list[str]:
    """After `python`; paths begin where the program that asks was started."""
    parts = [part.replace("RANKS", str(ranks)) for part in VARIANTS[key].command]
    return [os.path.relpath(ROOT / part) if part.endswith(".py") else part for part in parts]


def start(command: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.Popen:
    """A process that prints into a pipe; env: variables for it."""
    return subprocess.Popen(
        [sys.executable, *command, f"--run-dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """Of a run that may be writing just now: its whole lines."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_command(command: Sequence[str], folder: Path, threads: int, show: bool) -> StageRun:
    """Run it until it ends. SystemExit with its status if that is not 0. threads: of each rank."""
    process = start(command, folder, {"OMP_NUM_THREADS": str(threads)})
    assert process.stdout
    output = []
    for line in process.stdout:
        output.append(line)
        if show:
            print(f"  {line}", end="", flush=True)
    if process.wait():
        print("" if show else "".join(output), end="", file=sys.stderr)
        raise SystemExit(process.returncode)
    return StageRun(json.loads((folder / "summary.json").read_text()), metrics_in(folder))


def run_quietly(key: str, ranks: int, *flags: str, threads: int = 1) -> StageRun:
    """A run whose files are not kept."""
    with TemporaryDirectory() as folder:
        command = [*command_of(key, ranks), *flags, f"--data-dir={ROOT / 'data'}"]
        return run_command(command, Path(folder), threads, show=False)


def time_apart(processes: int, local_batch: int, *flags: str, steps: int = 50) -> list[float]:
    """Stage 01 in so many processes at once, which never talk: the seconds of their steps.

    Ranks would be as fast if averaging cost nothing. A step counts only if all processes trained
    from its beginning to its end: they start together and would train forever, what each began
    before all had ended an epoch is dropped, and they are killed together, when each of them has
    taken enough steps.
    """
    flags = (*flags, f"--batch-size={local_batch}", f"--epochs={MANY}", f"--max-steps={MANY}")
    command = [*command_of("ceiling", processes), *flags]
    with TemporaryDirectory() as folder:
        folders = [Path(folder, str(number)) for number in range(processes)]
        running = [start(command, at, variables(n, processes)) for n, at in enumerate(folders)]
        if sys.platform == "linux" and not torch.cuda.is_available():
            for number, process in enumerate(running):
                pin(number, processes, process.pid)  # as `-m shm` does with ranks
        try:
            return steps_of_all(running, folders, steps)
        finally:
            for process in running:
                process.kill()
                process.communicate()


def variables(number: int, processes: int) -> dict[str, str]:
    """One thread, and a GPU of its own if there are enough."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes)))).split(",")
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[number]} if torch.cuda.device_count() >= processes else {}
    return {"OMP_NUM_THREADS": "1", **gpu}


def steps_of_all(running: Sequence[Any], folders: Sequence[Path], steps: int) -> list[float]:
    """The seconds of so many steps of each process, all of them taken while all trained."""
    first_epochs: list[int] = []  # of each process, the first one that began when all trained
    while True:
        time.sleep(0.2)  # to read more often would slow down what is measured
        for process in running:
            if process.poll() is not None:
                print(process.communicate()[0], end="", file=sys.stderr)
                raise SystemExit(process.returncode)
        metrics = [metrics_in(folder) for folder in folders]
        if not first_epochs and all(metrics):  # the epoch after the last line is under way
            first_epochs = [lines[-1]["epoch"] + 2 for lines in metrics]
        seconds = [
            [line["seconds"] for line in lines if line["epoch"] >= first]
            for lines, first in zip(metrics, first_epochs, strict=False)
        ]
        if seconds and all(len(each) >= steps for each in seconds):
            return [second for each in seconds for second in each[:steps]]
