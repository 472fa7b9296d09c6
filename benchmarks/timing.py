"""How this project times: variants take turns in one run, and are compared round by round.

    python benchmarks/timing.py

A machine that others share is faster in one minute and slower in the next. Two variants of one
round meet almost the same machine, so their ratio holds where their times do not.
Each round runs every variant once, in a random order, and the first variant twice: how far
the ratio of a thing to itself is from 1 (A/A) shows how far to trust the other ratios.
"""

import hashlib
import importlib
import inspect
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tabulate import tabulate

from common.options import Parser, UsageError
from common.record import hardware

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SAME = "A/A"  # the first variant once more

Draw = Callable[[dict[str, Any], Path], object]  # what results look like, into that file
Times = dict[str, list[float]]  # of each variant, the seconds a step in each round


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int,
    warm_up: int = 3,
    meet: Callable[[], object] = lambda: None,
) -> Times:
    """Time every variant in each round, and the first one twice.

    variants: what one step does. A round runs `steps` of them and keeps their mean. With several
    ranks, `meet` is a barrier: all start each variant together, in the same order.
    """
    first = next(iter(variants))
    runs = {**variants, SAME: variants[first]}
    for run in variants.values():
        for _ in range(warm_up):  # DDP, for one, arranges its buckets again after the first step
            run()
    times: Times = {name: [] for name in runs}
    order = random.Random(0)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            meet()
            start = now()
            for _ in range(steps):
                runs[name]()
            times[name].append((now() - start) / steps)
    return times


def of_all_ranks(mine: list[float]) -> list[float]:
    """Of each number, the largest that a rank has; without ranks, as it is."""
    if not dist.is_initialized():
        return mine
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(mine, dtype=torch.float64, device=where)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)  # every rank must reach this line
    return numbers.tolist()


def of_the_slowest(times: Times) -> Times:
    """Each time as the slowest rank has it: the others wait for it anyway."""
    return {name: of_all_ranks(seconds) for name, seconds in times.items()}


def now() -> float:
    """Seconds, once a GPU has done what it was told: it runs behind the program."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def summarize(times: Times, baseline: str | None = None) -> dict[str, dict[str, Any]]:
    """Of each variant: median step in ms, and its ratio to the baseline with a 95 % interval.

    The ratio is the median over the rounds of (its time / the baseline's time in that round). The
    interval comes from the bootstrap (Efron, 1979): medians of rounds drawn with replacement.
    """
    base = np.array(times[baseline or next(iter(times))])
    draw = np.random.default_rng(0).integers(len(base), size=(2000, len(base)))
    summary = {}
    for name, seconds in times.items():
        ratios = np.array(seconds) / base
        if name == (baseline or next(iter(times))):
            low = high = 1.0
        else:
            low, high = np.percentile(np.median(ratios[draw], axis=1), [2.5, 97.5])
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        summary[name] = {
            "step_ms": round(statistics.median(seconds) * 1000, 4),
            "step_ms_quartiles": [round(q * 1000, 4) for q in (quartiles[0], quartiles[2])],
            "ratio": round(float(np.median(ratios)), 4),
            "ratio_interval": [round(float(low), 4), round(float(high), 4)],
        }
    return summary


def table(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """The summary as text."""
    rows = [
        (
            name,
            f"{row['step_ms']:.2f}",
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["ratio_interval"]),
        )
        for name, row in summary.items()
    ]
    headers = ("variant", "step, ms", "ratio", "95 % interval")
    return tabulate(rows, headers, disable_numparse=True)


def provenance(device: str = "cpu", **settings: Any) -> dict[str, Any]:
    """Where, when and how something was measured: it stands in every file under results/."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "hardware": hardware(torch.device(device)),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": date.today().isoformat(),
        **settings,
    }


def add_effort(parser: ArgumentParser, quick: str, brief: str) -> None:
    """Add --quick and --brief, how much to measure, and --out, where to write it."""
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help=f"{quick}; nothing is written")
    effort.add_argument("--brief", action="store_true", help=brief)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there, and draw nothing")


def add_device(parser: ArgumentParser, cuda: str) -> None:
    """Add --device; cuda: what happens on a GPU. See `require_device`."""
    add, choices = parser.add_argument, ("cpu", "cuda")
    add("--device", default="cpu", choices=choices, help=f"cuda: {cuda}")


def require_device(device: str) -> None:
    """UsageError if that is a GPU, and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none here: try --device cpu")


def most_rounds(args: Namespace) -> int:
    """No comparison takes more rounds than that: 1 only shows that it runs."""
    return 1 if args.quick else 5 if args.brief else 1000


def keep(args: Namespace, name: str, results: dict[str, Any], draw: Draw | None = None) -> None:
    """Write the results to --out; or, if they are whole, to results/NAME.json, and draw them.

    Those of a GPU get a name of their own: NAME_cuda.
    """
    name += "_cuda" if getattr(args, "device", "cpu") == "cuda" else ""
    if args.out:
        save(args.out, results)
    elif not args.quick and not args.brief:
        save(RESULTS / f"{name}.json", results)
        if draw:
            draw_picture(name, draw)


def save(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def draw_picture(name: str, draw: Draw) -> None:
    """Make results/NAME.png of results/NAME.json; it keeps what it was made of."""
    path = RESULTS / f"{name}.png"
    draw(json.loads((RESULTS / f"{name}.json").read_text()), path)
    note = PngInfo()
    note.add_text("made of", made_of(name, draw))
    with Image.open(path) as picture:
        picture.load()
        picture.save(path, pnginfo=note)


def made_of(name: str, draw: Draw) -> str:
    """A digest of what a picture shows and of the function that draws it."""
    source = inspect.getsource(draw).encode()
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes() + source).hexdigest()


def chapter(stage: str, name: str) -> ModuleType:
    """A file of a stage as a module; the number in a stage's name keeps `import` from it."""
    (folder,) = ROOT.glob(f"{stage}*")
    if sys.path[0] != str(folder):  # before the benchmarks: one of them has a chapter's name
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def main() -> None:
    torch.set_num_threads(1)
    matrix = torch.randn(300, 300)
    variants = {"one product": lambda: matrix @ matrix, "two": lambda: matrix @ matrix @ matrix}
    print(table(summarize(interleave(variants, rounds=30, steps=20))))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
