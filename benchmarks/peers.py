"""Whole trainings on MNIST: each stage, PyTorch's recipe, two libraries, the documents' recipe.

On the CPU, two ranks of one thread each, and the same optimization for all. All are timed from
outside, by the lines that they print: one before the ranks join, one when an epoch and its
evaluation end. Accelerate and Fabric take part if they are installed: requirements-peers.txt.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import MNIST

from common.data import load_dataset, make_loader
from common.options import UsageError
from plots import BLUE, ORANGE, Figure, bars
from recipe import PACKAGES, TRANSFORM
from step import build, make_step
from timing import ROOT, SAME, Effort, Results, Steps, interleave, summarize

RANKS, BATCH, TARGET, EPOCHS, STEPS = 2, 120, 0.98, 4, 500  # STEPS: of an epoch
SETTINGS = {"dataset": "mnist", "model": "net", "device": "cpu", "batch-size": BATCH}
SETTINGS |= {"lr": 0.02, "momentum": 0.9, "seed": 1234}
OURS, PLAIN = "04 DDP", "PyTorch's recipe"
RECIPE = "benchmarks/recipe.py"
VARIANTS = {  # what is typed after `python`, or after `torchrun --standalone --nproc-per-node=2`
    "01 one process": "01_single_gpu/train.py",
    "02 DataParallel": f"02_data_parallel/train.py --replicas={RANKS}",
    "03 by hand": f"03_ddp_manual_allreduce/train.py --world-size={RANKS}",
    OURS: "04_ddp_torchrun/train.py",
    "04 over shm": "-m shm 04_ddp_torchrun/train.py",
    "05 DDP": "05_amp_syncbn/train.py",
    PLAIN: f"{RECIPE} plain",
    "the same, 2 workers": f"{RECIPE} plain --workers=2",
    "Accelerate": f"{RECIPE} accelerate",
    "Lightning Fabric": f"{RECIPE} fabric",
    "the documents' recipe": f"{RECIPE} documents",
    "PyTorch's recipe, our data": f"{RECIPE} plain --data=ours",
    "Accelerate, our data": f"{RECIPE} accelerate --data=ours",
    "Fabric, our data": f"{RECIPE} fabric --data=ours",
}


@dataclass
class Log:
    start_up: float = 0.0  # seconds since it was started
    ends: list[float] = field(default_factory=list)  # of each epoch and its evaluation
    accuracy: float = 0.0


def run(program: str, data_dir: Path, flag: str, target: float) -> Log:
    """Run a program as a user would; end it once it has reached the target accuracy."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, *([] if re.match("0[123]", program) else torchrun)]
    command += [*program.split(), f"--data-dir={data_dir.resolve()}", flag]
    command += [f"--{name}={value}" for name, value in SETTINGS.items()]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    how["env"] = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log, begin = Log(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        command.append(f"--run-dir={folder}")
        with subprocess.Popen(command, stderr=errors, **how) as process:
            for line in process.stdout or ():
                if line.startswith("global batch "):
                    log.start_up = time.perf_counter() - begin
                elif match := re.match(r"epoch \d+/.*test accuracy ([\d.]+)%", line):
                    log.ends.append(time.perf_counter() - begin)
                    log.accuracy = float(match[1]) / 100
                    if log.accuracy >= target:
                        process.terminate()  # torchrun and stage 03 end their ranks
                        break
        errors.seek(0)
        if not log.ends or (process.returncode and log.accuracy < target):
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
    return log


def us_per_sample(data_dir: Path, batches: int) -> dict[str, float]:
    """Microseconds per sample of one thread: loading it in two ways, and a training step."""
    local = BATCH // RANKS
    pictures = MNIST(data_dir, transform=TRANSFORM)
    ours, _ = load_dataset(Namespace(dataset="mnist", data_dir=data_dir, batch_size=BATCH))
    one, whole = DataLoader(pictures, local), make_loader(ours, local, RandomSampler(ours))
    steps: Steps = {
        "load it, one picture after the other": partial(next, iter(one)),
        "load it, a batch at a time": partial(next, iter(whole)),
        "forward, backward, optimizer": make_step(*build("net", local)),
    }
    times = interleave(steps, batches, warm_up=1)
    return {name: round(median(times[name]) / local * 1e6, 1) for name in steps}


def measure_peers(effort: Effort) -> Results:
    """Rounds of one epoch each; in the first, some continue until they reach the target."""
    try:
        MNIST(effort.data_dir)
    except RuntimeError as error:
        raise UsageError(f"--data-dir {effort.data_dir} holds no MNIST: name another") from error
    short, steps = effort.quick or effort.brief, 2 if effort.quick else STEPS
    programs, left_out = dict[str, str](), dict[str, str]()
    few = (OURS, "01 one process" if effort.quick else PLAIN, "Accelerate", "Lightning Fabric")
    for name in few if short else VARIANTS:
        package = next((PACKAGES[word] for word in PACKAGES if f" {word}" in VARIANTS[name]), "")
        if package and not find_spec(package):
            left_out[name] = f"{package} is not installed: pip install -r requirements-peers.txt"
        else:
            programs[name] = VARIANTS[name]
    programs |= {} if effort.quick else {SAME: VARIANTS[OURS]}
    logs: dict[str, list[Log]] = {name: [] for name in programs}
    order, rounds = random.Random(0), min(3, effort.rounds)
    for turn in range(rounds):
        for name in order.sample(list(programs), len(programs)):
            races = turn == 0 and not short and not name.endswith(("workers", "our data", SAME))
            until = (f"--epochs={EPOCHS}", TARGET) if races else (f"--max-steps={steps}", 2.0)
            logs[name].append(run(programs[name], effort.data_dir, *until))
            print(f"round {turn + 1}: {name}", flush=True)
    return {
        "provenance": {"world_size": RANKS, "threads_a_rank": 1},
        "settings": {**SETTINGS, "target": TARGET, "ranks": RANKS},
        "rounds": rounds,
        "left_out": left_out,
        "us_a_sample": us_per_sample(effort.data_dir, 2 if effort.quick else 100),
        "variants": summary(logs, steps),
    }


def summary(logs: dict[str, list[Log]], steps: int) -> dict[str, Results]:
    times = {name: [log.ends[0] - log.start_up for log in each] for name, each in logs.items()}
    found = {}
    for name, row in summarize(times, baseline=OURS).items():
        first, reached = logs[name][0], logs[name][0].accuracy >= TARGET
        found[name] = {
            **{"ratio": row["ratio"], "ratio_interval": row["ratio_interval"]},
            "samples_per_second": round(steps * BATCH / median(times[name]), 1),
            "start_up_seconds": round(median(log.start_up for log in logs[name]), 2),
            "target_seconds": round(first.ends[-1], 2) if reached else None,
            "target_epochs": len(first.ends) if reached else None,
        }
    return found


def draw_peers(results: Results) -> Figure:
    figure, (speed, race) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    found = {name: row for name, row in results["variants"].items() if name != SAME}
    looks = [(BLUE, "") if name[:2].isdigit() else (ORANGE, "//") for name in found]
    for axis, key, unit in ((speed, "samples_per_second", ""), (race, "target_seconds", " s")):
        values = [row[key] or 0 for row in found.values()]
        texts = [f"{value:,.0f}{unit}" if value else "not in the race" for value in values]
        bars(axis, found, values, looks, texts)
    speed.set(title="One epoch with its evaluation", xlabel="samples/s, all ranks together")
    race.set(title=f"From the command to {TARGET:.0%} test accuracy", xlabel="seconds")
    figure.suptitle(
        f"MNIST, net, global batch {BATCH} on {RANKS} ranks of one thread, "
        f"{results['provenance']['hardware']}.\nPlain: the stages; hatched: others"
    )
    return figure
