"""Programs that are started from a shell, as a reader starts them, and what they run there."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from local_ranks.chapters import ROOT
from local_ranks.run_files import Run, same_run
from local_ranks.train_stage import train_once

LAUNCH = ROOT / "04_ddp_torchrun" / "launch"
MODEL = ("--model=net-bn", "--batch-size=60", "--device=cpu")
BIN = Path(sys.executable).parent
SECONDS = 120  # more than anything here takes


def environment(**env: object) -> dict[str, str]:
    """Make the environment of a reader's shell; torchrun and python are those of this suite."""
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": ROOT, **env}
    return os.environ | {name: str(value) for name, value in env.items()}


def heed_sigint() -> None:
    """In a suite that runs in the background, SIGINT is ignored, and bash could not trap it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begin(*command: object, cwd: Path = ROOT, **env: object) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes |= {"cwd": cwd, "env": environment(**env), "start_new_session": True}
    pipes["preexec_fn"] = heed_sigint
    return subprocess.Popen([str(part) for part in command], **pipes)


def end(process: subprocess.Popen) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def run(*command: object, **more) -> tuple[int, str]:
    return end(begin(*command, **more))


def until(happened) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def is_the_run_of(ranks: int, folder: Path, key: str, *flags: str) -> bool:
    return same_run(Run(folder, [], ""), train_once(key, ranks, *flags, dtype=torch.float32))


def processes_with(text: object) -> dict[int, str]:
    """The processes of this machine with this text in their command, and these commands."""
    found = subprocess.run(["pgrep", "-fa", re.escape(str(text))], capture_output=True, text=True)
    lines = (line.partition(" ") for line in found.stdout.splitlines())
    return {int(pid): command for pid, _, command in lines}


def assert_none_is_left_with(text: object) -> None:
    """A process that was killed takes a moment to end, on a busy machine."""
    deadline = time.monotonic() + 10
    while left := processes_with(text):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


RUN_STAGE = """
import runpy, sys, torch
from unittest.mock import MagicMock
torch._dynamo = MagicMock(disable=lambda call, *_, **__: call)
sys.modules.update({{name: torch._dynamo for name in ("torch._dynamo", "torch._dynamo.utils")}})
sys.argv[0] = "{0}/train.py"
sys.path.insert(0, "{0}")
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # a stage, whose optimizer would import torch.compile, for seconds
SUM_OF_RANKS = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
of = os.environ["LOCAL_WORLD_SIZE"], dist.get_world_size()
print(local_rank, "of", *of, "sum", total.item(), "threads", torch.get_num_threads())
dist.destroy_process_group()
"""
