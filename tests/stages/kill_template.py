"""Kills runs of 05_amp_syncbn/template.py at random moments and compares what resumes: make faults.

Each kind of run is killed five times, resumed each time, and must end with the bits of a run that
was never stopped: weights, optimizer, schedule. It is killed by SIGKILL to all its processes, as if
the machine stopped, or by SIGTERM to the process that was started, as a cluster does.

    PYTHONPATH=tests python tests/stages/kill_template.py
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.result_files import RESULTS, provenance, save
from local_ranks.chapters import ROOT
from local_ranks.machine import scratch_folder
from shm.busy import LoadWatch

TEMPLATE = ROOT / "05_amp_syncbn/template.py"
FLAGS = ("--epochs=12", "--accumulate=2", "--amp=bf16", "--workers=1")
KILLS = 5
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
COMMANDS = {"python": (sys.executable,)} | {
    f"torchrun, {ranks} rank{'s' * (ranks > 1)}": (*TORCHRUN, f"--nproc-per-node={ranks}")
    for ranks in (1, 2, 3)
}


def start(command: tuple[str, ...], folder: Path) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    line = (*command, str(TEMPLATE), *FLAGS)
    return subprocess.Popen(line, cwd=folder, env=env, **pipe)


def descendants(pid: int) -> list[int]:
    """Return this process and all that it and its children have started: a rank of torchrun leads
    a process group of its own."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True)
    parents = dict(map(int, line.split()) for line in listed.stdout.splitlines())
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found


def kill_at_random(process: subprocess.Popen, draw: random.Random) -> str:
    """Kill the run some time after a random line; returns the signal, or "" if it had ended."""
    assert process.stdout
    for _ in process.stdout:
        if draw.random() < 0.15:
            break
    time.sleep(draw.random())
    if process.poll() is not None:
        return ""
    processes = descendants(process.pid)
    name = draw.choice(("SIGTERM", "SIGKILL"))
    if name == "SIGTERM":
        process.terminate()
        process.wait(60)  # torchrun ends its ranks first
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return name


def finish(command: tuple[str, ...], folder: Path) -> dict:
    output, _ = start(command, folder).communicate(timeout=600)
    assert "epoch 12 test" in output or "12 of 12 epochs" in output, output
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)  # type: ignore[arg-type]
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)  # type: ignore
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))  # type: ignore
    return one == other


def trial(name: str, seed: int) -> dict:
    """Kill a run of this kind until it has met KILLS signals, and compare."""
    folder, draw, signals = scratch_folder(), random.Random(seed), []
    whole = finish(COMMANDS[name], scratch_folder())
    while len(signals) < KILLS:
        met = kill_at_random(start(COMMANDS[name], folder), draw)
        if not met:  # it has ended: begin again
            (folder / "checkpoint.pt").unlink()
            signals.clear()
            continue
        signals.append(met)
    resumed = finish(COMMANDS[name], folder)
    row = {"start": name, "signals": signals, "same_bits": equal(whole, resumed)}
    print(row, flush=True)
    return row


def main() -> None:
    watch = LoadWatch()
    rows = [trial(name, seed) for seed, name in enumerate(COMMANDS)]
    save(
        RESULTS / "template_kills.json",
        {"provenance": provenance() | watch.load(), "flags": FLAGS, "trials": rows},
    )
    if not all(row["same_bits"] for row in rows):
        raise SystemExit("a resumed run has other bits")


if __name__ == "__main__":
    main()
