"""Run and measure on a GPU all that needs one, in about ten minutes, the most valuable first.

    python benchmarks/gpu.py                              # as `make gpu`
    python benchmarks/gpu.py --seconds 540 --out FOLDER   # where time is short
    python benchmarks/gpu.py --device cpu                 # a rehearsal of all this, in small
    python benchmarks/gpu.py --only formats tests         # these two steps
    python benchmarks/gpu.py --dry-run                    # only prints the commands

It needs Linux, PyTorch, torchvision, tabulate, tqdm and pytest, and neither a network nor git.
Where our packages are not installed, put PYTHONPATH=.:packages/prove/src:packages/shm/src in front.
After each command, gpu.json in the folder holds its status and its results, and log.txt its output:
stop it when you like. The next call with the same folder continues, and tries again what failed or
was measured with another commit; --only names what alone is run.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import torch
from tqdm import tqdm

from benchmarks.gpu_runner import kill_all_of, run
from benchmarks.gpu_steps import GpuStep, list_steps
from benchmarks.result_files import RESULTS, Results, file_name, hardware, provenance, write_json
from common.bar import progress_bar
from common.options import Parser, UsageError, exit_on, int_at_least
from local_ranks.chapters import ROOT

SHOWN = ("timeline.svg", "tour/report.md")  # what a command leaves for people to look at
SECONDS_APART = 15  # time to import torch before the first step, and to end the last one
SAME = ("hardware", "torch")  # all results of a file share them; each step has its own commit


class Report:
    """Keeps the folder of results, whose gpu.json and log.txt are whole after each step."""

    def __init__(self, folder: Path, origin: Results) -> None:
        self.folder, self.file, self.lock = folder, folder / "gpu.json", Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.commit = origin["commit"]
        self.results: Results = {"provenance": origin, "steps": {}}
        if self.file.exists():
            older = json.loads(self.file.read_text())
            if all(older["provenance"][key] == origin[key] for key in SAME):
                self.results["steps"] = older["steps"]

    def is_missing(self, step: GpuStep) -> bool:
        """Is there no good result of this step with the present commit?"""
        row = self.results["steps"].get(step.name, {})
        return not row.get("good") or row["commit"] != self.commit

    def add(self, step: GpuStep, row: Results, scratch: Path) -> None:
        with self.lock:
            output = (scratch / "output.txt").read_text(errors="replace")
            with (self.folder / "log.txt").open("a") as log:
                log.write(f"\n$ {row['command']}\n{output}")
            for name in SHOWN:
                if (scratch / name).exists():
                    shutil.copy(scratch / name, self.folder)
            self.results["steps"][step.name] = row | {"commit": self.commit}
            write_json(self.file.with_suffix(".tmp"), self.results)
            self.file.with_suffix(".tmp").replace(self.file)
            how = f"status {row['status']}" if row["status"] is not None else "cut off"
            good = "" if row["good"] else "  <- see log.txt"
            with tqdm.external_write_mode():
                print(f"{row['seconds']:6.1f} s  {step.name}: {how}{good}", flush=True)


def run_all(steps: Sequence[GpuStep], report: Report, seconds: float) -> list[str]:
    """Run steps in order, and side by side where they may; list those for which time was over."""
    deadline, late = time.monotonic() + seconds - SECONDS_APART, []
    bar = progress_bar("gpu", total=len(steps), unit="command")
    with TemporaryDirectory() as scratch, bar:

        def run_one(numbered: tuple[int, GpuStep]) -> None:
            number, step = numbered
            seconds_left = min(step.seconds, deadline - time.monotonic())
            if seconds_left <= 0:
                late.append(step.name)
                return
            folder = Path(scratch, str(number))
            bar.set_postfix_str(step.name)
            report.add(step, run(step, folder, seconds_left), folder)
            bar.update()

        for beside, group in groupby(enumerate(steps), lambda each: each[1].beside_others):
            workers = max(1, (os.cpu_count() or 1) // 2) if beside else 1
            with ThreadPoolExecutor(workers) as pool:
                try:
                    list(pool.map(run_one, group))
                except BaseException:  # also Ctrl-C
                    pool.shutdown(wait=False, cancel_futures=True)
                    kill_all_of(Path(scratch))
                    raise
    return late


def describe_machine() -> Results:
    """Describe what a failure may depend on."""
    try:
        call = ["nvidia-smi"]
        driver = subprocess.run(call, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        driver = str(error)
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {"nvidia-smi": driver.splitlines(), "nccl": nccl}


def choose(steps: list[GpuStep], names: Sequence[str]) -> list[GpuStep]:
    """Choose the steps of these names, or all of them if none is named."""
    known = [step.name for step in steps]
    if wrong := [name for name in names if name not in known]:
        raise UsageError(f"--only {wrong[0]}: no such step; there are {', '.join(known)}")
    return [step for step in steps if not names or step.name in names]


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add, gpu = parser.add_argument, torch.cuda.device_count() > 0
    add("--only", nargs="+", default=(), metavar="STEP", help="run these steps of gpu.json")
    add("--dry-run", action="store_true", help="print every command, run none")
    add("--seconds", type=int_at_least(20), metavar="N", help="for all together; then it ends")
    add("--out", type=Path, metavar="FOLDER", help="for the results; see below")
    devices = ("cuda", "cpu") if gpu else ("cpu",)
    add("--device", choices=devices, default=devices[0], help="cpu: a rehearsal, in small")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    default = RESULTS / "gpu" / file_name(hardware("cuda")) if on_gpu else ROOT / "runs" / "gpu"
    args.out = (args.out or default).absolute()
    return args


def main() -> None:
    args = parse_args()
    steps = choose(list_steps(args.device), args.only)
    if args.dry_run:
        return print(*(step.text for step in steps), sep="\n")
    origin = provenance(args.device, command="python benchmarks/gpu.py", machine=describe_machine())
    report = Report(args.out, origin)
    missing = [step for step in steps if report.is_missing(step)]
    if args.device == "cpu":
        print("a rehearsal on the CPU, in small: its numbers mean nothing")
    print(f"{origin['hardware']}: {len(missing)} of {len(steps)} commands are left", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run_all then ends its commands
    late = run_all(missing, report, args.seconds or math.inf)
    if late:
        print(f"no time was left for: {', '.join(late)}")
    print(f"wrote {args.out}")
    if any(map(report.is_missing, steps)):
        raise SystemExit(1)  # log.txt says why; a second call tries again what failed


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
