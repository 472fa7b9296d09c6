"""Time whole trainings on MNIST: each stage, PyTorch's own recipe, Accelerate and Lightning Fabric.

    python benchmarks/peers.py --data-dir ../shared/data

On the CPU, two ranks of one thread each, and the same optimization for all: network, weights at the
start, order of the samples, global batch, learning rate. Programs run one after the other, in a
random order in each round. All are timed from outside, by the lines that they print: one before the
ranks join, one when an epoch and its evaluation end. Accelerate and Fabric take part if
they are installed: pip install -r requirements-peers.txt.
Writes peers.json and peers.png under results/.
"""

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from common.data import load_dataset, make_loader
from common.models import Net
from common.options import Parser, UsageError, number, usage_errors_exit

from timing import ROOT, SAME, add_effort, keep, provenance, summarize

RANKS, BATCH, TARGET, EPOCHS = 2, 120, 0.98, 4
SETTINGS = {"model": "net", "batch-size": BATCH, "lr": 0.02, "momentum": 0.9, "seed": 1234}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
OURS, PLAIN = "04 DDP", "PyTorch's recipe"


@dataclass(frozen=True)
class Variant:
    """What python is told to run, the package that it needs, and whether it races to the target."""

    command: tuple[str, ...]
    package: str = ""
    races: bool = True


def peer(script: str, *flags: str, package: str = "", races: bool = True) -> Variant:
    return Variant((*TORCHRUN, f"benchmarks/peers/{script}.py", *flags), package, races)


VARIANTS = {
    "01 one process": Variant(("01_single_gpu/train.py",)),
    "02 DataParallel": Variant(("02_data_parallel/train.py", f"--replicas={RANKS}")),
    "03 by hand": Variant(("03_ddp_manual_allreduce/train.py", f"--world-size={RANKS}")),
    OURS: Variant((*TORCHRUN, "04_ddp_torchrun/train.py")),
    "05 DDP": Variant((*TORCHRUN, "05_amp_syncbn/train.py")),
    PLAIN: peer("plain"),
    "the same, 2 workers": peer("plain", "--workers=2", races=False),
    "Accelerate": peer("accelerate_", package="accelerate"),
    "Lightning Fabric": peer("fabric_", package="lightning_fabric"),
    "PyTorch's recipe, our data": peer("plain", "--data=ours", races=False),
    "Accelerate, our data": peer("accelerate_", "--data=ours", package="accelerate", races=False),
    "Fabric, our data": peer("fabric_", "--data=ours", package="lightning_fabric", races=False),
}
BRIEF = (OURS, PLAIN, "Accelerate", "Lightning Fabric")


@dataclass
class Log:
    """What a program said, and when: seconds since it was started."""

    start_up: float
    epoch_ends: list[float]
    accuracies: list[float]

    def first_epoch_seconds(self) -> float:
        """From joining to the end of the first evaluation, the loading of each batch included."""
        return self.epoch_ends[0] - self.start_up

    def to(self, target: float) -> tuple[float, int] | None:
        """Seconds since the program was started, and epochs, to an evaluation that reaches it."""
        for epoch, (end, accuracy) in enumerate(
            zip(self.epoch_ends, self.accuracies, strict=True), 1
        ):
            if accuracy >= target:
                return end, epoch
        return None


def read(lines: Iterator[tuple[float, str]], target: float = 2.0) -> Log:
    """The log of a program's lines, no further than to the epoch that reaches the target."""
    log = Log(0.0, [], [])
    for seconds, line in lines:
        if line.startswith("global batch "):
            log.start_up = seconds
        elif match := re.match(r"epoch \d+/.*test accuracy ([\d.]+)%", line):
            log.epoch_ends.append(seconds)
            log.accuracies.append(round(float(match[1]) / 100, 4))
            if log.accuracies[-1] >= target:
                break
    return log


def run(variant: Variant, data_dir: Path, *flags: str, target: float = 2.0) -> Log:
    """Run a program as a user would; end it once it has reached the target."""
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    shared = ["--dataset=mnist", "--device=cpu", f"--data-dir={data_dir.resolve()}", *settings]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, *variant.command, *shared, f"--run-dir={folder}", *flags]
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout
        try:
            log = read(((time.perf_counter() - start, line) for line in process.stdout), target)
            if reached := log.to(target) is not None:
                process.terminate()  # torchrun and stage 03 end their ranks
            process.communicate()
        except BaseException:
            process.terminate()
            process.communicate()
            raise
        errors.seek(0)
        if not log.epoch_ends or (process.returncode and not reached):
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
    return log


def choose(names: tuple[str, ...]) -> tuple[dict[str, Variant], dict[str, str]]:
    """Those of the variants that can run here, and why the others cannot."""
    missing = {
        name: f"{VARIANTS[name].package} is not installed: pip install -r requirements-peers.txt"
        for name in names
        if VARIANTS[name].package and not find_spec(VARIANTS[name].package)
    }
    return {name: VARIANTS[name] for name in names if name not in missing}, missing


def us_a_sample(data_dir: Path, batches: int = 100) -> dict[str, float]:
    """What one sample costs a process of one thread, in us: to load it in two ways, to learn it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    local = BATCH // RANKS
    pictures = MNIST(data_dir, transform=Compose([ToTensor(), Normalize((0.1307,), (0.3081,))]))
    ours, _ = load_dataset(Namespace(dataset="mnist", data_dir=data_dir, batch_size=BATCH))
    loaders: dict[str, Callable[[], Iterator]] = {
        "load it, one picture after the other": lambda: iter(DataLoader(pictures, local, True)),
        "load it, a batch at a time": lambda: iter(make_loader(ours, local, RandomSampler(ours))),
    }
    spent: dict[str, list[float]] = {}
    model = Net(1, 28, 10, batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
    for name, make in loaders.items():
        batch = make()
        next(batch)
        for _ in range(batches):
            start = time.perf_counter()
            images, labels = next(batch)
            spent.setdefault(name, []).append(time.perf_counter() - start)
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            spent.setdefault("forward, backward, optimiser", []).append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return {name: round(statistics.median(x) / local * 1e6, 1) for name, x in spent.items()}


def measure(
    data_dir: Path,
    rounds: int,
    names: tuple[str, ...] = tuple(VARIANTS),
    race: bool = True,
    steps: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Rounds of one epoch each; in the first, those that race go on until they reach the target.

    steps: of a round, if it is less than an epoch.
    """
    chosen, left_out = choose(names)
    runs = {**chosen, SAME: Variant(VARIANTS[OURS].command, races=False)}
    logs: dict[str, list[Log]] = {name: [] for name in runs}
    short = [f"--max-steps={steps}"] if steps else ["--epochs=1"]
    order = random.Random(0)
    for number_of in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            long = race and number_of == 0 and runs[name].races
            flags, target = ([f"--epochs={EPOCHS}"], TARGET) if long else (short, 2.0)
            logs[name].append(log := run(runs[name], data_dir, *flags, target=target))
            say(f"round {number_of + 1}: {name}: {log.first_epoch_seconds():.1f} s an epoch")
    return {
        "settings": {**SETTINGS, "target": TARGET, "ranks": RANKS},
        "rounds": rounds,
        "versions": {v.package: version(v.package) for v in chosen.values() if v.package},
        "left_out": left_out,
        "us_a_sample": us_a_sample(data_dir, 2 if steps else 100),
        "variants": summary(logs, steps or 60_000 // BATCH),
    }


def summary(logs: dict[str, list[Log]], steps: int) -> dict[str, dict[str, Any]]:
    """Of each variant: samples/s, how many times as fast stage 04 is, seconds to the target."""
    times = {name: [log.first_epoch_seconds() for log in each] for name, each in logs.items()}
    ratios = summarize(times, baseline=OURS)
    found: dict[str, dict[str, Any]] = {}
    for name, each in logs.items():
        reached = each[0].to(TARGET)
        found[name] = {
            "samples_per_second": round(steps * BATCH / statistics.median(times[name]), 1),
            "ratio": ratios[name]["ratio"],
            "ratio_interval": ratios[name]["ratio_interval"],
            "start_up_seconds": round(statistics.median(log.start_up for log in each), 2),
            "target_seconds": round(reached[0], 2) if reached else None,
            "target_epochs": reached[1] if reached else None,
            "accuracies": each[0].accuracies,
        }
    return found


def rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells of the table, for people; `HEADS` are above them."""
    cells: list[tuple[str, ...]] = []
    for name, row in results["variants"].items():
        low, high = row["ratio_interval"]
        reached = row["target_seconds"]
        until = f"{reached:.0f} ({row['target_epochs']})" if reached else ""
        cells.append(
            (
                name,
                f"{row['samples_per_second']:,.0f}",
                f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
                f"{row['start_up_seconds']:.1f}",
                until,
            )
        )
    return cells


HEADS = ("", "samples/s", "time / 04's", "start-up, s", f"s to {TARGET:.0%} (epochs)")


def draw(results: dict[str, Any], path: Path) -> None:
    figure, (speed, race) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    found = {name: row for name, row in results["variants"].items() if name != SAME}
    stage = [name[:2].isdigit() for name in found]
    style: dict[str, Any] = {"edgecolor": "white", "hatch": ["" if x else "//" for x in stage]}
    style["color"] = ["#0072B2" if x else "#E69F00" for x in stage]  # Okabe and Ito
    bars = speed.barh(list(found), [row["samples_per_second"] for row in found.values()], **style)
    speed.bar_label(bars, fmt="{:,.0f}", padding=3)
    speed.set(title="One epoch with its evaluation", xlabel="samples/s, all ranks together")
    seconds = [row["target_seconds"] or 0 for row in found.values()]
    starts = [row["start_up_seconds"] if row["target_seconds"] else 0 for row in found.values()]
    bars = race.barh(list(found), seconds, **style)
    race.barh(list(found), starts, color="#999999", label="of which start-up")
    labels = [
        f"{row['target_seconds']:.0f} s, {row['target_epochs']} epochs"
        if row["target_seconds"]
        else "not in the race"
        for row in found.values()
    ]
    race.bar_label(bars, labels, padding=3)
    race.set(title=f"From the command to {TARGET:.0%} test accuracy", xlabel="seconds")
    race.legend()
    for axis in (speed, race):
        axis.margins(x=0.4)  # room for the labels
    speed.invert_yaxis()
    where = results["provenance"]["hardware"]
    figure.suptitle(
        f"MNIST, net, global batch {BATCH} on {RANKS} ranks of one thread, {where}.\n"
        "Plain: the stages; hatched: others"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data-dir", default=Path("data"), type=Path, metavar="PATH", help="holds MNIST/raw")
    add("--rounds", default=3, type=number(int, 1), metavar="N", help="of all programs")
    add_effort(parser, "two steps of four of them", "stage 04 and its peers only, and no race")
    args = parser.parse_args()
    try:
        MNIST(args.data_dir)
    except RuntimeError as error:
        raise UsageError(f"--data-dir {args.data_dir} holds no MNIST: name another") from error
    where = provenance(world_size=RANKS, threads_a_rank=1)  # before there is load
    results = {"provenance": where} | (
        measure(args.data_dir, 1, BRIEF, race=False, steps=2)
        if args.quick
        else measure(
            args.data_dir,
            args.rounds,
            BRIEF if args.brief else tuple(VARIANTS),
            race=not args.brief,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    print(tabulate(rows(results), HEADS, disable_numparse=True))
    print("\n" + tabulate(results["us_a_sample"].items(), ("one thread", "us a sample")))
    for name, why in results["left_out"].items():
        print(f"left out: {name}: {why}")
    keep(args, "peers", results, draw)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
