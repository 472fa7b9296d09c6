"""What a fence must hold, from its source: the output of a command, a lesson, a part of a file."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from markers import Fence
from repository_pages import ROOT

PARENTS = {  # for each train.py that teaches a difference, the folder of its parent
    "02_data_parallel": "01_single_gpu",
    "03_ddp_manual_allreduce": "01_single_gpu",
    "04_ddp_torchrun": "03_ddp_manual_allreduce",
    "05_amp_syncbn": "04_ddp_torchrun",
    "beyond/survive": "05_amp_syncbn",
}
LEFT_OUT = "...\n"  # between two parts of a file
SPEED = re.compile(r"(?P<before>^epoch \d+/\d+ .+  )(?P<speed>[\d,]+) samples/s$", re.M)


def shell(command: str, cwd: Path = ROOT, seconds: float = 180) -> str:
    """Run a command with the programs of this Python and one thread; return its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = ["bash", "-e", "-o", "pipefail", "-c", command]
    seconds *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # on a busy machine, longer
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": seconds}
    done = subprocess.run(call, cwd=cwd, env=env, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def without_speeds(output: str) -> str:
    """The output of a training, with ... for the samples/s of each epoch."""
    return SPEED.sub(r"\g<before>... samples/s", output)


@cache
def lesson(stage: str) -> str:
    """The smallest difference between a train.py and its parent's, as `diff -u` finds it."""
    return shell(f"diff -u -d {PARENTS[stage]}/train.py {stage}/train.py || true")


def part_of_lesson(stage: str, first: str, last: str) -> str:
    """Cut a lesson: from the line that begins with `first` to the next that begins with `last`."""
    lines = lesson(stage).splitlines(keepends=True)[2:]  # without the names of the files
    end = 0
    for words in (first, last):
        places = [n for n, line in enumerate(lines) if n >= end and line.startswith(words)]
        if not places:
            what = f"{stage}/README.md, in a `lesson:` comment: no changed line begins with"
            raise SystemExit(f"{what} {words!r}")
        start, end = end, places[0]
    return "".join(lines[start : end + 1])


def part_of_file(part: str, source: str) -> str:
    """Read a part of a file again, from its first line to its last; as it is where one is gone."""
    lines, quoted = source.splitlines(), part.strip("\n").splitlines()
    if part in source or lines.count(quoted[0]) != 1:
        return part
    first = lines.index(quoted[0])
    ends = [place for place in range(first, len(lines)) if lines[place] == quoted[-1]]
    ends = ends[quoted.count(quoted[-1]) - 1 :]  # such a line may also stand inside
    return part.replace("\n".join(quoted), "\n".join(lines[first : ends[0] + 1])) if ends else part


def quotation(fence: Fence) -> str | None:
    """What a fence of a diff or of python must hold; None if no comment says where it is from."""
    if fence.marker == "lesson":
        stage = fence.page.parent.relative_to(ROOT).as_posix()
        return part_of_lesson(stage, *fence.value.split(" ... "))
    if fence.marker != "part of":
        return None
    text = (fence.page.parent / fence.value).read_text()
    if fence.language == "diff":
        return "".join(text.splitlines(keepends=True)[2:])
    return LEFT_OUT.join(part_of_file(part, text) for part in fence.text.split(LEFT_OUT))


def output(fence: Fence) -> str | None:
    """What the command of a fence prints; None if it shows no output."""
    if not fence.command:
        return None
    print(fence.command, flush=True)
    return without_speeds(shell(fence.command, seconds=3600))
