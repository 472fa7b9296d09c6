"""Run a command of gpu.py: end all that it has started, and read what it has left."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu_steps import GpuStep
from benchmarks.result_files import Results
from local_ranks.chapters import ROOT

PACKAGES = (".", "packages/prove/src", "packages/shm/src")  # their folders, installed or not
MARK = "RUN_BY_GPU_PY"  # a variable of all processes that we start, so that we find them again


def start(step: GpuStep, folder: Path, output: Path) -> subprocess.Popen:
    """Start the command as a reader would, in a session of its own."""
    paths = [*(str(ROOT / package) for package in PACKAGES), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), MARK: str(folder)}
    # NVML answers whether there is a GPU without initializing CUDA: a process that has initialized
    # it cannot fork ranks, as the tests and prove do.
    variables |= {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash shows the line of Python
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
    """End a command and all that it has started: ranks have sessions of their own."""
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
    while (running := processes_of(folder)) and time.monotonic() < end_of_wait:
        for pid in running:
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


def run(step: GpuStep, folder: Path, seconds: float) -> Results:
    """Run a command; return how it ended and what it has left in its folder."""
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
    """Read what a command has left: JSON files, and how each test ended."""
    results: Results = {}
    for path in folder.glob("*.json"):
        with suppress(ValueError):  # a file may be cut off
            results[path.stem] = json.loads(path.read_text())
    if (folder / "tests.xml").exists():
        with suppress(ElementTree.ParseError):
            cases = ElementTree.parse(folder / "tests.xml").iter("testcase")
            results["tests"] = {
                f"{case.get('classname')}.{case.get('name')}": [part.tag for part in case]
                or "passed"
                for case in cases
            }
    return results
