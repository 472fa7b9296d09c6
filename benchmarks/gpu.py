"""Measure on a GPU all that needs one: five parts of at most nine minutes each.

    PYTHONPATH=. python benchmarks/gpu.py  # as `make gpu`: all that has not ended yet
    PYTHONPATH=. python benchmarks/gpu.py --only tour  # one part
    PYTHONPATH=. python benchmarks/gpu.py --dry-run  # print and check every command; needs no GPU

It needs Linux, PyTorch, torchvision, matplotlib, tabulate and pytest, but no network. After each
command, its result is in results/gpu. The next call leaves out the commands that have ended, and
repeats those that a time limit has cut off.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch

from common.options import Parser, UsageError, exit_on_usage_error, float_at_least
from run_stage import command_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
MINUTES = {"tests": 7, "tour": 4, "bench": 8, "resnet50": 7, "cifar10": 2}
KEPT = ("runs/gpu/tour/tour.*", "runs/gpu/tour/report.md", "benchmarks/results/*-x-*.json")
RESNET = ("switches", "precision")  # the sections of bench.py for resnet18 and resnet50
CIFAR = "--amp bf16 --epochs 24 --batch-size 512 --lr 0.1"


def list_commands() -> dict[str, list[str]]:
    """The commands of each part, without `python`. Tests for GPUs have `gpu` in their names."""
    tests = []
    for path in sorted(ROOT.glob("tests/test_*.py")):
        if re.search(r'needs (a|two) GPUs?"|"needs GPUs: ', text := path.read_text()):  # a skip
            names = re.findall(r"^def (test_\w*gpu\w*)", text, re.M)
            tests.append(" ".join(f"tests/{path.name}::{name}" for name in names))
    flags, bench = "--device cuda --run-dir runs/gpu/", "benchmarks/bench.py --device cuda --only "
    stages = [
        f"{' '.join(command_of(key, 2))} --model net-bn {flags}{key}"
        for key in ("03", "04", "05-bf16")
    ]
    return {
        "tests": [f"-m pytest -v --tb=short {ids}" for ids in tests],
        "tour": [
            f"benchmarks/tour.py --ranks 1 {flags}tour",
            *stages,
        ],
        "bench": [bench + each for each in import_module("bench").BENCH if each not in RESNET],
        "resnet50": [bench + each for each in RESNET],
        "cifar10": [f"beyond/survive/cifar10.py {CIFAR} {flags}cifar10"],
    }


def check(command: str) -> str:
    """What is wrong with it. Its own program says that: with one flag too many, it does not run."""
    script, *flags = command.split("--nproc-per-node 2 ")[-1].split()
    if flags[0] == "pytest":
        with redirect_stdout(StringIO()) as said:
            wrong = import_module("pytest").main([*flags[1:], "--collect-only", "-q"])
        return f"{wrong!r} {said.getvalue()}" if wrong else ""
    argv, path = [script, *flags, "--stop"], [str((ROOT / script).parent), *sys.path]
    fake = patch.object(torch.cuda, "is_available", lambda: True)  # else --device knows no cuda
    called, stopped = patch.multiple(sys, argv=argv, path=path), suppress(SystemExit)
    with redirect_stderr(StringIO()) as said, fake, called, stopped:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return "" if "unrecognized arguments: --stop " in said.getvalue() else said.getvalue() or "?"


def run(command: str, seconds: float) -> dict:
    """Run it as a reader would. All output goes to log.txt; returns what can be read from it."""
    start, env = time.monotonic(), {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    call = ["timeout", "-k20", f"{max(1, seconds):.0f}", sys.executable, *command.split()]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "log.txt").open("a+", errors="replace") as log:
        print(f"\n$ python {command}", file=log, flush=True)
        begin = log.tell()
        with subprocess.Popen(call, env=env, stdout=log, stderr=log) as process:
            try:
                status = process.wait()
            finally:
                process.terminate()  # after Ctrl-C; `timeout` then ends the command
        log.seek(begin)
        text = log.read()
    seconds = round(time.monotonic() - start, 1)
    found: dict = {"status": "cut off" if status in (124, 137) else status, "seconds": seconds}
    found["tests"] = dict(re.findall(r"^tests/\S+::(.+?) ([A-Z]{5,})\b", text, re.M))
    for summary in Path(command.split()[-1]).glob("summary.json"):  # of --run-dir
        found["summary"] = json.loads(summary.read_text())
    for path in (path for pattern in KEPT for path in ROOT.glob(pattern)):
        (RESULTS / path.name).write_bytes(path.read_bytes())
    print(f"  status {status}, {seconds} s", *text.splitlines()[-15:] if status else (), sep="\n  ")
    return found


def main() -> None:
    parser = Parser(__doc__)
    add, now = parser.add_argument, time.monotonic
    add("--only", choices=MINUTES, help="run this part only")
    add("--again", action="store_true", help="also run what has ended")
    add("--dry-run", action="store_true", help="print and check every command, run none")
    add("--minutes", default=28.0, type=float_at_least(0), help="for all; the next call continues")
    args = parser.parse_args()
    if not (args.dry_run or torch.cuda.is_available()):
        raise UsageError("torch sees no GPU: try --dry-run")
    os.chdir(ROOT)
    file, end, ends = RESULTS / "gpu.json", now() + 60 * args.minutes, dict[str, float]()
    results, parts = json.loads(file.read_text()) if file.exists() else {}, list_commands()
    for part, command in ((p, c) for p in parts for c in parts[p] if args.only in (None, p)):
        done = results.setdefault(part, {})
        seconds = min(end, ends.setdefault(part, now() + 60 * MINUTES[part])) - now()
        print(f"{part}: python {command}", flush=True)
        if args.dry_run:
            if wrong := check(command):
                raise UsageError(f"python {command}: {wrong}")
        elif part == "cifar10" and not Path("data/cifar-10-batches-py").exists():
            print("    left out: data has no folder cifar-10-batches-py")
        elif args.again or done.get(command, {}).get("status", "cut off") == "cut off":
            done[command] = run(command, seconds)
            file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    with exit_on_usage_error():
        main()
