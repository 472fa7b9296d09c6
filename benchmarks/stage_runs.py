"""Run a stage as a reader would: its command in a process of its own, and the files that it leaves.

The tour shows what a stage prints, measure_stages.py repeats the runs in turns, and gpu.py lists
the commands.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "RANKS")
STAGE_04, STAGE_05 = "04_ddp_torchrun/train.py", "05_amp_syncbn/train.py"
COMMANDS: dict[str, tuple[str, ...]] = {  # RANKS stands for their number
    "01": ("01_single_gpu/train.py",),
    "02": ("02_data_parallel/train.py", "--replicas", "RANKS"),
    "03": ("03_ddp_manual_allreduce/train.py", "--world-size", "RANKS"),
    "04": (*TORCHRUN, STAGE_04),
    "04-shm": (*TORCHRUN, "-m", "shm", STAGE_04),
    "05": (*TORCHRUN, STAGE_05),
    "05-shm": (*TORCHRUN, "-m", "shm", STAGE_05),
    "05-bf16": (*TORCHRUN, STAGE_05, "--amp", "bf16"),
    "05-bf16-shm": (*TORCHRUN, "-m", "shm", STAGE_05, "--amp", "bf16"),
    "survive": (*TORCHRUN, "beyond/survive/train.py"),
}


@dataclass(frozen=True)
class StageRun:
    """What a run left: summary.json, and the lines of metrics.jsonl, one for each step."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def losses(self, epochs: float = math.inf) -> list[float]:
        return [line["loss"] for line in self.metrics if line["epoch"] < epochs]

    def seconds(self) -> list[float]:
        """Of each step after the first epoch, in which a program warms up."""
        return [line["seconds"] for line in self.metrics if line["epoch"] > 0]


def command_of(key: str, ranks: int) -> list[str]:
    """After `python`; paths begin where the program that asks was started."""
    parts = [part.replace("RANKS", str(ranks)) for part in COMMANDS[key]]
    return [os.path.relpath(ROOT / part) if part.endswith(".py") else part for part in parts]


def run_command(command: Sequence[str], folder: Path, threads: int, show: bool) -> StageRun:
    """Run it until it ends. SystemExit with its status if that is not 0. threads: of each rank."""
    process = subprocess.Popen(
        [sys.executable, *command, f"--run-dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    assert process.stdout
    output = []
    for line in process.stdout:
        output.append(line)
        if show:
            print(f"  {line}", end="", flush=True)
    if process.wait():
        print("" if show else "".join(output), end="", file=sys.stderr)
        raise SystemExit(process.returncode)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((folder / "summary.json").read_text())
    return StageRun(summary, [json.loads(line) for line in lines])


def run_quietly(key: str, ranks: int, *flags: str, threads: int = 1) -> StageRun:
    """A run whose files are not kept."""
    with TemporaryDirectory() as folder:
        command = [*command_of(key, ranks), *flags, f"--data-dir={ROOT / 'data'}"]
        return run_command(command, Path(folder), threads, show=False)
