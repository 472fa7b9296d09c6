"""Run a stage as a reader would: its command in a process of its own, and the files that it leaves.

The tour shows what a stage prints, and stages.py repeats the runs in turns.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.variants import command_of
from local_ranks.chapters import ROOT
from local_ranks.run_files import read_metrics
from shm.cores import pin

MANY = 10**6  # epochs: more than anybody waits for


@dataclass(frozen=True)
class StageRun:
    """Holds what a run left: summary.json, and the lines of metrics.jsonl, one for each step."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    def seconds(self) -> list[float]:
        """List the seconds of each step after the first epoch, in which a program warms up."""
        return [line["seconds"] for line in self.metrics if line["epoch"] > 0]


def start(command: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.Popen:
    """Start a process that prints into a pipe; env: variables for it."""
    return subprocess.Popen(
        [sys.executable, *command, f"--run-dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )


def run_command(command: Sequence[str], folder: Path, threads: int, show: bool) -> StageRun:
    """Run a command until it ends; threads: of each rank.

    Raises SystemExit with its status if that is not 0.
    """
    process = start(command, folder, {"OMP_NUM_THREADS": str(threads)})
    assert process.stdout
    output = []
    for line in process.stdout:
        output.append(line)
        if show:
            with tqdm.external_write_mode():
                print(f"  {line}", end="", flush=True)
    if process.wait():
        print("" if show else "".join(output), end="", file=sys.stderr)
        raise SystemExit(process.returncode)
    return StageRun(json.loads((folder / "summary.json").read_text()), read_metrics(folder))


def run_quietly(key: str, world_size: int, device: str, *flags: str, threads: int = 1) -> StageRun:
    """Run a variant of which only the numbers are kept."""
    flags = (f"--device={device}", *flags, f"--data-dir={ROOT / 'data'}")
    with TemporaryDirectory() as folder:
        command = [*command_of(key, world_size, device), *flags]
        return run_command(command, Path(folder), threads, show=False)


def time_without_messages(
    processes: int, local_batch: int, *flags: str, steps: int = 50
) -> list[float]:
    """Time the steps of stage 01 in so many processes at once, which never talk.

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
    """Give a process one thread, and a GPU of its own if there are enough."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes)))).split(",")
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[number]} if torch.cuda.device_count() >= processes else {}
    return {"OMP_NUM_THREADS": "1", **gpu}


def steps_of_all(running: Sequence[Any], folders: Sequence[Path], steps: int) -> list[float]:
    """Wait for so many steps of each process while all train; return their seconds."""
    first_epochs: list[int] = []  # for each process, the first one that began when all trained
    while True:
        time.sleep(0.2)  # to read more often would slow down what is measured
        for process in running:
            if process.poll() is not None:
                with tqdm.external_write_mode():
                    print(process.communicate()[0], end="", file=sys.stderr)
                raise SystemExit(process.returncode)
        metrics = [read_metrics(folder) for folder in folders]
        if not first_epochs and all(metrics):  # the epoch after the last line is under way
            first_epochs = [lines[-1]["epoch"] + 2 for lines in metrics]
        seconds = [
            [line["seconds"] for line in lines if line["epoch"] >= first]
            for lines, first in zip(metrics, first_epochs, strict=False)
        ]
        if seconds and all(len(each) >= steps for each in seconds):
            return [second for each in seconds for second in each[:steps]]
