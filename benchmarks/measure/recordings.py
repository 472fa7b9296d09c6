"""Run a script or the stages with the recorder, and cut a step out of what it has recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure.timeline_recorder import Kind, RecordedStep, Recording, Span
from benchmarks.result_files import Results, provenance
from benchmarks.variants import VARIANTS, command_of
from common.options import UsageError
from local_ranks.chapters import ROOT
from local_ranks.machine import KEEP_FREED_MEMORY
from prove.processes import hook_variables
from prove.watch.process_io import COLLECTIVES
from shm.busy import LoadWatch

WARM_UP = 5  # steps that are not compared
RANKS, GLOBAL_BATCH = 2, 120


def recorder_variables(folder: str | Path) -> dict[str, str]:
    """Tell timeline_recorder where to write, and prove's names of the collectives."""
    return {"TIMELINE_FOLDER": str(folder), "TIMELINE_COLLECTIVES": ",".join(COLLECTIVES)}


def record(command: Sequence[str], quiet: bool, **variables: str) -> list[Recording]:
    """Record a command; return what each of its processes recorded, by rank.

    variables: more of them for its environment. Raises SystemExit if the command fails.
    """
    with TemporaryDirectory() as folder:
        env = {"OMP_NUM_THREADS": "1", **os.environ, **recorder_variables(folder), **variables}
        env |= hook_variables(os.environ, Path(__file__).parent, "timeline_recorder")
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
        try:
            done = subprocess.run(command, env=env, text=True, check=False, **pipes)
        except OSError as error:
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
        recordings = read_recordings(Path(folder))
    if done.returncode:
        print(done.stdout or "", end="", file=sys.stderr)
        raise SystemExit(done.returncode)
    if not recordings:
        raise UsageError("no process took an optimizer step: expected a script that trains")
    return recordings


def read_recordings(folder: Path) -> list[Recording]:
    recordings: list[Recording] = [json.loads(path.read_text()) for path in folder.iterdir()]
    for recording in recordings:
        recording["steps"] = [[Span(*span) for span in step] for step in recording["steps"]]
    return sorted(recordings, key=lambda recording: recording["rank"])


def ends_of_steps(recording: Recording) -> list[float]:
    """When the first step began, and when the optimizer was done with each step."""
    spans = [span for step in recording["steps"] for span in step]
    start = min(span.begin for span in spans if span.kind == Kind.FORWARD)
    optimizers = [[s for s in step if s.kind == Kind.OPTIMIZER] for step in recording["steps"]]
    return [start, *(each[-1].end for each in optimizers)]


def cut(recordings: Sequence[Recording], number: int) -> RecordedStep:
    """Cut out one step of all ranks, in milliseconds since the first of them began it."""
    ends = [ends_of_steps(recording) for recording in recordings]
    start = min(each[number] for each in ends)

    def milliseconds(seconds: float) -> float:
        return round(1000 * (seconds - start), 3)

    step: RecordedStep = {"ms": milliseconds(max(each[number + 1] for each in ends)), "ranks": []}
    for recording in recordings:
        spans = [
            span._replace(begin=milliseconds(span.begin), end=milliseconds(span.end))
            for span in recording["steps"][number]
            if span.begin >= start
        ]
        step["ranks"].append({"rank": recording["rank"], "spans": spans})
    return step


def choose_step(*runs: Sequence[Recording]) -> Results:
    """Choose the step of median length among those of all runs; say of how many."""
    compared: list[RecordedStep] = []
    for recordings in runs:
        steps = min(len(recording["steps"]) for recording in recordings)
        if steps <= WARM_UP:
            raise UsageError(f"the script took {steps} steps: expected more than {WARM_UP}")
        compared += [cut(recordings, number) for number in range(WARM_UP, steps)]
    compared.sort(key=lambda step: step["ms"])
    quarter = len(compared) // 4
    return {
        "steps": len(compared),
        "ms_quartiles": [compared[quarter]["ms"], compared[-1 - quarter]["ms"]],
        "shown": compared[(len(compared) - 1) // 2],
    }


def record_stages(
    stages: Sequence[str], model: str = "net-bn", steps: int = 65, turns: int = 1
) -> Results:
    """Record the stages in turns, each with so many steps in a turn."""
    about = {"model": model, "ranks": RANKS, "global_batch": GLOBAL_BATCH}
    watch = LoadWatch()
    results: Results = {"provenance": provenance(), **about}
    runs: dict[str, list[Sequence[Recording]]] = {stage: [] for stage in stages}
    for stage in [*stages] * turns:  # in turns: what else the machine does hits them all alike
        print(VARIANTS[stage].label, flush=True)
        with TemporaryDirectory() as folder:
            flags = ["--device=cpu", f"--model={model}", f"--batch-size={GLOBAL_BATCH}"]
            flags += ["--epochs=100", f"--max-steps={steps}"]
            flags += [f"--run-dir={folder}", f"--data-dir={ROOT / 'data'}"]
            command = [sys.executable, *command_of(stage, RANKS), *flags]
            runs[stage].append(record(command, quiet=True, **KEEP_FREED_MEMORY))
    results["provenance"] |= watch.load()
    results["stages"] = {stage: choose_step(*runs[stage]) for stage in stages}
    return results
