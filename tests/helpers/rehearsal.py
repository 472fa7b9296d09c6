"""A machine that seems to have GPUs: calls of CUDA become calls of the CPU, and are written down.

    python tests/helpers/rehearsal.py  # writes docs/gpu_lines.md: which lines no rehearsal reaches

A rehearsal shows which branches a script takes, and in which order it asks for what. It shows
nothing of what a GPU computes, of its memory, of its streams and of nccl.
"""

import ast
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from local_ranks import ROOT, run_ranks, scratch_folder

PAGE = ROOT / "docs" / "gpu_lines.md"
SHORT = ("--device=cuda", "--epochs=1", "--max-steps=2", f"--data-dir={ROOT / 'data'}")
EXAMPLES = ("contrastive", "gan", "language", "segmentation")
SCRIPTS = {
    "01_single_gpu/train.py": SHORT,
    "03_ddp_manual_allreduce/train.py": (*SHORT, "--backend=nccl"),
    "04_ddp_torchrun/train.py": SHORT,
    "04_ddp_torchrun/minimal.py": (),
    "05_amp_syncbn/train.py": (*SHORT, "--model=net-bn", "--amp=fp16"),
    "beyond/survive/train.py": (*SHORT, "--model=net-bn", "--amp=bf16", "--accumulate=2"),
    "beyond/survive/own_loop.py": (".",),  # its run folder
    "beyond/shard/train.py": (*SHORT, "--width=32", "--layers=1", "--batch-size=8"),
    "beyond/convert/classifier/classifier_ddp.py": ("--epochs=1",),
    **{f"beyond/convert/examples/{name}_ddp.py": () for name in EXAMPLES},
}
HEAD = """\
# Lines that only a GPU reaches

No machine of this project has a GPU, so the suite *rehearses* one. Calls of CUDA become calls of
the CPU, each script trains whole, and its ranks write down which GPU they ask for, and when
([test_devices.py](../tests/stages/test_devices.py)). That shows that each rank takes its own GPU,
names it before the ranks meet, and puts every tensor there. It shows nothing of what a GPU
computes, of its memory and its streams, and of nccl between real GPUs.

Of {total} statements that ask for a GPU, or stand in a branch that only a GPU takes, a rehearsal
runs {reached}. No machine has run the other {left};
`python tests/helpers/rehearsal.py` writes this list.

| line | statement |
|---|---|"""
END = "Back to [the start](../README.md).\n"
LESSONS = [*sorted(ROOT.glob("0*_*/**/*.py")), *sorted(ROOT.glob("common/*.py"))]
for folder in (
    "convert",
    "convert/classifier",
    "convert/detector",
    "convert/examples",
    "survive",
    "shard",
    "local_sgd",
):
    LESSONS += sorted(ROOT.glob(f"beyond/{folder}/*.py"))


@dataclass
class Seen:
    """What one rank asked of its machine. Devices are numbers of GPUs, in order of first use."""

    calls: list[str] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    lines: set[tuple[str, int]] = field(default_factory=set)
    error: str = ""
    output: str = ""


class Event:
    """Of a stream that is always done at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return 1.0  # ms


class WriteDown(TorchFunctionMode):
    """Notes each GPU that a call of torch names; `cuda` alone is the GPU that was set, else 0."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.current = seen, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is torch.device:  # a device may say cuda here, as no tensor ever reaches it
            with torch._C.DisableTorchFunction():
                return function(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.device) and value.type == "cuda":
                number = self.current if value.index is None else value.index
                if number not in self.seen.devices:
                    self.seen.devices.append(number)
        return function(*args, **(kwargs or {}))

    def set_device(self, device: Any) -> None:
        self.current = device if isinstance(device, int) else torch.device(device).index
        self.seen.calls.append(f"set_device {self.current}")


def pretend(gpus: int, seen: Seen) -> None:
    """From now on, this process sees that many GPUs."""
    from prove import cpu

    cpu.install(gpus)
    join = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **more: Any):
        which = "" if device_id is None else f", device_id {torch.device(device_id).index}"
        seen.calls.append(f"join {backend}{which}")
        join(backend, *args, **more)

    notes = WriteDown(seen)
    notes.__enter__()
    dist.init_process_group = init_process_group
    torch.cuda.Event = Event
    torch.cuda.set_device = notes.set_device
    torch.cuda.current_device = lambda: notes.current
    uuid = os.environ.get("MACHINE", "") + os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def properties(device: Any) -> Any:
        return type("Properties", (), {"uuid": f"{uuid}{torch.device(device).index}"})

    torch.cuda.get_device_properties = properties


def trace(lines: set[tuple[str, int]]) -> None:
    """Write down each line of the lessons that runs from now on, in all threads."""
    files = {str(path): str(path.relative_to(ROOT)) for path in LESSONS}

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            lines.add((files[frame.f_code.co_filename], frame.f_lineno))
        return local

    def begin(frame: FrameType, event: str, arg: object) -> Any:
        return local if frame.f_code.co_filename in files else None

    threading.settrace(begin)
    sys.settrace(begin)


def _rehearse(
    rank: int, script: str, flags: tuple, gpus: int, envs: list, changes: tuple, follow: bool
) -> Seen:
    path, seen = ROOT / script, Seen()
    source = path.read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{script} has not, once: {old}"
        source = source.replace(old, new)
    os.environ.update(envs[rank])
    os.chdir(scratch_folder())
    Path("data/MNIST").mkdir(parents=True)
    Path("data/MNIST/raw").symlink_to(ROOT / "common" / "digits")  # where classifier_ddp.py looks
    pretend(gpus, seen)
    if follow:
        trace(seen.lines)
    sys.argv, sys.path[0:0] = [script, *flags], [str(path.parent)]

    def spawn(train: Callable, args: tuple, nprocs: int) -> None:  # stage 03: this rank is there
        ranks, _, *rest = args
        train(rank, ranks, int(os.environ["MASTER_PORT"]), *rest)

    code, out = compile(source, str(path), "exec"), StringIO()
    try:
        with patch.object(torch.multiprocessing, "spawn", spawn), redirect_stdout(out):
            exec(code, {"__name__": "__main__", "__file__": str(path)})
    except SystemExit as end:
        seen.error = f"exit status {end.code}"
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    seen.output = out.getvalue()
    return seen


def rehearse(
    script: str,
    *flags: str,
    gpus: int,
    ranks: int = 2,
    envs: Sequence[dict[str, str]] = (),
    changes: tuple[tuple[str, str], ...] = (),
    follow: bool = False,
) -> list[Seen]:
    """Run a script on ranks whose machines have that many GPUs.

    envs: for each rank, what its launcher says otherwise than torchrun on one machine.
    changes: texts of the script to replace. follow: note each line of the lessons that runs.
    """
    envs = envs or [{}] * ranks
    return run_ranks(ranks, _rehearse, script, flags, gpus, envs, changes, follow)


@cache
def rehearse_all() -> dict[str, list[Seen]]:
    """Every script on as many GPUs as it has ranks, followed line by line."""
    ranks = {script: 1 if script.startswith("01") else 2 for script in SCRIPTS}
    return {
        script: rehearse(script, *flags, gpus=ranks[script], ranks=ranks[script], follow=True)
        for script, flags in SCRIPTS.items()
    }


QUERIES = re.compile(r"torch\.cuda\.(is_available|device_count|is_initialized)\(")


def lines_for_gpus(path: Path) -> set[int]:
    """Statements that call torch.cuda, or that stand in a branch for GPUs and refuse nothing.

    A query such as torch.cuda.is_available() runs on a CPU as well, and so does a refusal.
    """
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and re.search("cuda|nccl", test := ast.unparse(node.test)):
            on_cpu = "!=" in test or " < " in test or test.startswith("not ")
            for statement in node.orelse if on_cpu else node.body:
                inside = [each for each in ast.walk(statement) if isinstance(each, ast.stmt)]
                lines |= {each.lineno for each in inside if not isinstance(each, ast.Raise)}
        simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
        if simple and "torch.cuda." in QUERIES.sub("", ast.unparse(node)):
            lines.add(node.lineno)
    return lines


def unreached_page() -> str:
    """The page docs/gpu_lines.md: what neither a CPU nor a rehearsal runs."""
    rehearsed = [rank for ranks in rehearse_all().values() for rank in ranks]
    run = {line for rank in rehearsed for line in rank.lines}
    total, rows = 0, []
    for path in LESSONS:
        name, text = str(path.relative_to(ROOT)), path.read_text().splitlines()
        for number in sorted(lines_for_gpus(path)):
            total += 1
            if (name, number) not in run:
                code = text[number - 1].strip().replace("|", "\\|")
                rows.append(f"| [{name}:{number}](../{name}) | `{code}` |")
    head = HEAD.format(total=total, reached=total - len(rows), left=len(rows))
    return "\n".join([head, *rows, "", END])


if __name__ == "__main__":
    PAGE.write_text(unreached_page())
