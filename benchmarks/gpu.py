"""Run and measure on a GPU all that needs one, in about ten minutes, the most valuable first.

    python benchmarks/gpu.py                              # as `make gpu`
    python benchmarks/gpu.py --seconds 540 --out FOLDER   # where time is short
    python benchmarks/gpu.py --device cpu                 # a rehearsal of all this, in small
    python benchmarks/gpu.py --only formats tests         # these two steps
    python benchmarks/gpu.py --dry-run                    # only prints the commands

It needs Linux, PyTorch, torchvision, tabulate and pytest, and neither a network nor git. Where our
packages are not installed, put PYTHONPATH=.:packages/prove/src:packages/shm/src in front. After
each command, gpu.json in the folder holds its status and its results, and log.txt its output: stop
it when you like. The next call with the same folder continues, and tries again what failed or was
measured with another commit; --only names what alone is run.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from xml.etree import ElementTree

import torch

from benchmarks.result_files import (
    RESULTS,
    Results,
    file_name,
    hardware,
    provenance,
    write_json,
)
from benchmarks.variants import STAGE_04, STAGE_05, SURVIVE
from common.options import Parser, UsageError, exit_on, int_at_least
from local_ranks.chapters import ROOT

PACKAGES = (".", "packages/prove/src", "packages/shm/src")  # where they lie, installed or not
MINIMAL, SHARD = "04_ddp_torchrun/minimal.py", "beyond/shard/train.py"
PICTURES = ("timeline.svg", "report.md")  # what a command leaves for people to look at
SECONDS_APART = 15  # to import torch before the first step, and to end the last one
SAME = ("hardware", "torch")  # of results in one file; each step has a commit of its own
MARK = "RUN_BY_GPU_PY"  # a variable of all processes that we start, so that we find them again


@dataclass(frozen=True)
class Step:
    """A command, and how long it may take."""

    name: str
    command: Sequence[str]  # after `python`; {folder} stands for a folder of its own
    seconds: int
    in_folder: bool = False  # started there, because it writes where it is started
    beside_others: bool = False  # nothing is timed: it may run while its neighbors do
    is_refused: bool = False  # it must fail
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        variables = [f"{name}={value}" for name, value in self.variables]
        text = " ".join([*variables, "python", *self.command])
        return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


def ranks(number: int, script: str, *flags: str) -> tuple[str, ...]:
    """A torchrun on this machine, whether or not its name can be resolved."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"
    return *launcher, f"--nproc-per-node={number}", f"{ROOT}/{script}", *flags


def list_steps(device: str) -> list[Step]:
    """The most valuable first. On a CPU, each is as small as shows that it runs."""
    on_gpu = device == "cuda"
    here, run = f"--device={device}", "--run-dir={folder}"
    shared = "--backend=gloo" if on_gpu else here  # two ranks can share a GPU over gloo only
    short = () if on_gpu else ("--epochs=1", "--max-steps=12")

    def bench(section: str, seconds: int, *flags: str) -> Step:
        flags = (f"--out={{folder}}/{section}.json", here, *flags)
        quick = () if on_gpu else ("--quick",)
        return Step(section, ("benchmarks/bench.py", section, *flags, *quick), seconds)

    jobs = ("-n", str(max(1, min(6, (os.cpu_count() or 1) // 2)))) if find_spec("xdist") else ()
    tests = ("-m", "pytest", *jobs, "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu")
    net, fp16 = "--model=net-bn", "--amp=fp16"
    images = ("--model=resnet18", "--dataset=synthetic", "--image-size=64", "--max-steps=60")
    large = ("--model=resnet50", "--image-size=224", "--batch-size=256", "--max-steps=24")
    large = ("--dataset=synthetic", "--amp=bf16", *(large if on_gpu else ("--batch-size=8",)))
    recorded = (sys.executable, *ranks(2, STAGE_04, *images, shared, run, *short))
    proven = ("torchrun", "--standalone", "--nproc-per-node=2", STAGE_04, shared, run)
    zero = (SHARD, "--library", "--shard=optimizer")
    together = [
        Step("04 alone", ranks(1, STAGE_04, here, run, *short), 60),
        Step("04 minimal", ranks(1, MINIMAL), 60, in_folder=True),
        Step("05 on two ranks", ranks(2, STAGE_05, net, shared, run, *short), 60),
        Step("05 in fp16", ranks(2, STAGE_05, net, fp16, shared, run, *short), 60),
        Step("survive", ranks(2, SURVIVE, net, fp16, here, run, *short), 60),
        Step("shard by hand", ranks(2, SHARD, "--max-steps=20", shared, run), 60),
        Step("shard", ranks(1, SHARD, "--library", "--max-steps=20", here, run), 60),
        Step("zero", ranks(2, *zero, "--max-steps=20", shared, run), 60),
        Step("units", ("05_amp_syncbn/formats.py",), 60),
        Step("fit", ("01_single_gpu/fit.py", "--model=resnet50", "--memory-limit=8GiB"), 60),
        Step("example", (f"{ROOT}/beyond/convert/examples/segmentation.py",), 60, in_folder=True),
        Step("prove", ("-m", "prove", "--json={folder}/prove.json", *proven), 90),
    ]
    if on_gpu:
        nccl = ("03_ddp_manual_allreduce/collectives.py", "--world-size=1", "--backend=nccl")
        alone = torch.cuda.device_count() == 1  # with more, nothing is refused
        allowed = (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)  # two ranks a GPU, from NCCL 2.30 on
        older = torch.cuda.nccl.version() < (2, 30)
        on_two, smallest = ranks(2, STAGE_04, run), ranks(2, MINIMAL)
        fsdp = ranks(2, SHARD, "--library", shared, run)
        together += [
            Step("collectives over nccl", nccl, 60),
            Step("FSDP over gloo", fsdp, 60, is_refused=True),
            Step("two ranks over nccl", on_two, 60, is_refused=alone),
            Step("two of minimal", smallest, 60, in_folder=True, is_refused=alone),
            Step("two that may", on_two, 60, is_refused=alone and older, variables=allowed),
        ]
    steps = [
        bench("formats", 150),
        Step("tests", (*tests, "--junitxml={folder}/tests.xml", "tests/stages"), 120),
        Step("tour", ("benchmarks/tour.py", "--ranks=2", here, run, *short), 120),
        *(replace(step, beside_others=True) for step in together),
        Step("one loader", ranks(1, STAGE_05, *large, here, run, *short), 60),
        Step("8 loaders", ranks(1, STAGE_05, *large, "--workers=8", here, run, *short), 60),
        bench("peaks", 45),
        bench("replicas", 30),
        bench("gloo", 60),
        bench("nccl", 90),
        Step("timeline", (f"{ROOT}/benchmarks/timeline.py", *recorded), 60, in_folder=True),
        bench("process_memory", 75),
        bench("stages", 150, "--rounds=1"),
    ]
    slower = 1 if on_gpu else 4  # a laptop has fewer cores
    return [replace(step, seconds=slower * step.seconds) for step in steps]


def start(step: Step, folder: Path, output: Path) -> subprocess.Popen:
    """Start the command as a reader would, in a session of its own."""
    paths = [*(str(ROOT / package) for package in PACKAGES), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), MARK: str(folder)}
    # So torch does not initialize CUDA when a script only asks whether there is a GPU: a process
    # that has initialized it cannot fork ranks, as the tests and prove do.
    variables |= {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # where it was, if it crashes
        **dict(step.variables),
    }
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *(word.format(folder=folder) for word in step.command)],
            cwd=folder if step.in_folder else ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen, folder: Path) -> None:
    """End it, and all that it has started: ranks have sessions of their own."""
    process.terminate()  # torchrun ends its ranks
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    kill_all_of(folder)
    process.wait()


def kill_all_of(folder: Path) -> None:
    """Kill every process that was started for this folder, or for one in it, until none is left.

    A process that the driver holds back does not end: it is not waited for longer than 10 s.
    """
    end_of_wait = time.monotonic() + 10
    while (left := processes_of(folder)) and time.monotonic() < end_of_wait:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes_of(folder: Path) -> list[int]:
    mark, found = f"\0{MARK}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in b"\0" + path.read_bytes():
                found.append(int(path.parent.name))
    return found


def run(step: Step, folder: Path, seconds: float) -> Results:
    """How the command ended, and what it has left in its folder."""
    folder.mkdir()
    output, began = folder / "output.txt", time.monotonic()
    process = start(step, folder, output)
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end(process, folder)
    return {
        "command": step.text,
        "status": status,
        "good": status is not None and (status != 0) == step.is_refused,
        "seconds": round(time.monotonic() - began, 1),
        "results": results_in(folder),
    }


def results_in(folder: Path) -> Results:
    """Its JSON files, the summaries of its runs, and how each test ended."""
    results: Results = {}
    for path in (*folder.glob("*.json"), *folder.glob("*/summary.json")):
        with suppress(ValueError):  # cut off
            results[str(path.relative_to(folder).with_suffix(""))] = json.loads(path.read_text())
    if (folder / "tests.xml").exists():
        with suppress(ElementTree.ParseError):
            cases = ElementTree.parse(folder / "tests.xml").iter("testcase")
            results["tests"] = {
                f"{case.get('classname')}.{case.get('name')}": [part.tag for part in case]
                or "passed"
                for case in cases
            }
    return results


class Report:
    """The folder of results: gpu.json and log.txt are whole after each step."""

    def __init__(self, folder: Path, origin: Results) -> None:
        self.folder, self.file, self.lock = folder, folder / "gpu.json", Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.commit = origin["commit"]
        self.results: Results = {"provenance": origin, "steps": {}}
        if self.file.exists():
            older = json.loads(self.file.read_text())
            if all(older["provenance"][key] == origin[key] for key in SAME):
                self.results["steps"] = older["steps"]

    def is_left(self, step: Step) -> bool:
        row = self.results["steps"].get(step.name, {})
        return not row.get("good") or row["commit"] != self.commit

    def add(self, step: Step, row: Results, left: Path) -> None:
        with self.lock:
            output = (left / "output.txt").read_text(errors="replace")
            with (self.folder / "log.txt").open("a") as log:
                log.write(f"\n$ {row['command']}\n{output}")
            for name in PICTURES:
                if (left / name).exists():
                    shutil.copy(left / name, self.folder)
            self.results["steps"][step.name] = row | {"commit": self.commit}
            write_json(self.file.with_suffix(".tmp"), self.results)
            self.file.with_suffix(".tmp").replace(self.file)
            how = f"status {row['status']}" if row["status"] is not None else "cut off"
            good = "" if row["good"] else "  <- see log.txt"
            print(f"{row['seconds']:6.1f} s  {step.name}: {how}{good}", flush=True)


def run_all(steps: Iterable[Step], report: Report, seconds: float) -> list[str]:
    """Run them in order, neighbors that may at the same time; those for which no time was left."""
    deadline, late = time.monotonic() + seconds - SECONDS_APART, []
    with TemporaryDirectory() as scratch:

        def run_one(numbered: tuple[int, Step]) -> None:
            number, step = numbered
            left = min(step.seconds, deadline - time.monotonic())
            if left <= 0:
                late.append(step.name)
                return
            folder = Path(scratch, str(number))
            report.add(step, run(step, folder, left), folder)

        for beside, group in groupby(enumerate(steps), lambda each: each[1].beside_others):
            workers = max(1, (os.cpu_count() or 1) // 2) if beside else 1
            with ThreadPoolExecutor(workers) as pool:
                try:
                    list(pool.map(run_one, group))
                except BaseException:  # Ctrl-C, too
                    pool.shutdown(wait=False, cancel_futures=True)
                    kill_all_of(Path(scratch))
                    raise
    return late


def describe_machine() -> Results:
    """What a failure may depend on."""
    try:
        call = ["nvidia-smi"]
        driver = subprocess.run(call, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        driver = str(error)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        address = str(error)
    return {
        "nvidia-smi": driver.splitlines(),
        "address of its name": address,
        "shared memory, MiB": shutil.disk_usage("/dev/shm").total >> 20,
        "nccl": torch.cuda.nccl.version() if torch.cuda.is_available() else None,
        "cudnn": torch.backends.cudnn.version(),
    }


def choose(steps: list[Step], names: Sequence[str]) -> list[Step]:
    """Those of these names, or all if none is named."""
    known = [step.name for step in steps]
    if wrong := [name for name in names if name not in known]:
        raise UsageError(f"--only {wrong[0]}: no such step; there are {', '.join(known)}")
    return [step for step in steps if not names or step.name in names]


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add, gpu = parser.add_argument, torch.cuda.device_count() > 0
    add(
        "--only",
        nargs="+",
        default=(),
        metavar="STEP",
        help="run these steps, named as in gpu.json",
    )
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
    left = [step for step in steps if report.is_left(step)]
    if args.device == "cpu":
        print("a rehearsal on the CPU, in small: its numbers mean nothing")
    print(f"{origin['hardware']}: {len(left)} of {len(steps)} commands are left", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends what it has started
    late = run_all(left, report, args.seconds or math.inf)
    if late:
        print(f"no time was left for: {', '.join(late)}")
    print(f"wrote {args.out}")
    if any(map(report.is_left, steps)):
        raise SystemExit(1)  # log.txt says why; a second call tries again what failed


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
