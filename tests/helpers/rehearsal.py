"""A machine that seems to have GPUs: calls of CUDA become calls of the CPU, and are written down.

A rehearsal shows which lines of a script run, and in which order it asks for what. It shows nothing
of what a GPU computes, of its memory, of its streams, of nccl and of DataParallel's replicas.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import apply_steps
from helpers.on_ranks import run_on_ranks
from local_ranks.chapters import ROOT
from local_ranks.machine import scratch_folder
from local_ranks.stage_files import replace_once
from local_ranks.train_stage import spawned_as

TWO_STEPS = ("--epochs=2", "--max-steps=2", f"--data-dir={ROOT / 'data'}")  # none in the second
SINGLE, MINIMAL_SINGLE = "01_single_gpu/train.py", "01_single_gpu/minimal.py"
REPLICAS = "02_data_parallel/train.py"
BY_HAND = "03_ddp_manual_allreduce/train.py"
DDP, MINIMAL = "04_ddp_torchrun/train.py", "04_ddp_torchrun/minimal.py"
AMP, TEMPLATE = "05_amp_syncbn/train.py", "05_amp_syncbn/template.py"
ONE_EPOCH = (("range(5)", "range(1)"),)  # of the minimal scripts, which have no flags
SURVIVE, OWN_LOOP = "beyond/survive/train.py", "beyond/survive/own_loop.py"
SHARD = "beyond/shard/train.py"
CONVERTED = "beyond/convert/classifier/classifier_ddp.py"  # made by the diffs beside it
EXAMPLES = tuple(
    f"beyond/convert/examples/{name}_ddp.py"
    for name in ("contrastive", "gan", "language", "segmentation")
)
ONE_PROCESS = (SINGLE, MINIMAL_SINGLE, REPLICAS)
FLAGS = {
    SINGLE: TWO_STEPS,
    MINIMAL_SINGLE: (),
    REPLICAS: TWO_STEPS,
    BY_HAND: (*TWO_STEPS, "--model=net-bn", "--backend=nccl"),
    DDP: (*TWO_STEPS, "--model=net-bn"),
    MINIMAL: (),
    AMP: (*TWO_STEPS, "--model=net-bn", "--amp=fp16"),
    TEMPLATE: ("--epochs=1", "--batch-size=600", "--amp=fp16", "--sync-bn"),
    SURVIVE: (*TWO_STEPS, "--model=net-bn", "--amp=bf16", "--accumulate=2"),
    OWN_LOOP: (".",),  # the run folder
    SHARD: (*TWO_STEPS, "--width=32", "--layers=1", "--batch-size=8"),
    CONVERTED: ("--epochs=1",),
    **dict.fromkeys(EXAMPLES, ()),
}


@dataclass
class RankLog:
    """What one rank asked of its machine. Devices are numbers of GPUs, in order of first use."""

    calls: list[str] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    lines: set[int] = field(default_factory=set)  # lines of the script that have run
    error: str = ""
    output: str = ""


class NoteGpus(TorchFunctionMode):
    """Notes each GPU that a call of torch names; `cuda` alone is the GPU that was set, else 0."""

    def __init__(self, log: RankLog) -> None:
        self.log, self.current = log, 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.device:  # a device may say cuda here, as no tensor ever reaches it
            with torch._C.DisableTorchFunction():
                return function(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.device) and value.type == "cuda":
                number = self.current if value.index is None else value.index
                if number not in self.log.devices:
                    self.log.devices.append(number)
        return function(*args, **(kwargs or {}))

    def set_device(self, device: Any) -> None:
        self.current = device if isinstance(device, int) else torch.device(device).index
        self.log.calls.append(f"set_device {self.current}")

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        yield
        self.current = before

    def manual_seed(self, seed: int) -> None:
        self.log.calls.append(f"seed {seed} on GPU {self.current}")


def pretend_gpus(gpus: int, log: RankLog) -> None:
    """Make this process see that many GPUs, perhaps none."""
    import prove.watch.pretend_gpus

    prove.watch.pretend_gpus.install(gpus)
    join, one_replica = dist.init_process_group, torch.nn.DataParallel.__init__

    def init_process_group(
        backend: Any = None, *args: Any, device_id: Any = None, **more: Any
    ) -> None:
        which = "" if device_id is None else f", device_id {torch.device(device_id).index}"
        log.calls.append(f"join {backend}{which}")
        join(backend, *args, **more)

    def replicate(self: Any, module: Any, device_ids: Sequence[int]) -> None:
        log.calls.append(f"replicas on GPUs {[*device_ids]}")
        one_replica(self, module)

    notes = NoteGpus(log)
    notes.__enter__()
    replica: Any = torch.nn.DataParallel
    cuda: Any = torch.cuda
    dist.init_process_group = init_process_group
    replica.__init__ = replicate
    cuda.set_device, cuda.device = notes.set_device, notes.device
    cuda.manual_seed = notes.manual_seed
    cuda.current_device = lambda: notes.current
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"{shown}{device.index}")


def run_and_note_lines(code: CodeType, names: dict[str, Any], lines: set[int]) -> None:
    """Run a script's code; add to `lines` each line of its file that runs in this thread."""

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != code.co_filename:
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return note

    sys.settrace(note)
    try:
        exec(code, names)
    finally:
        sys.settrace(None)


def _rehearse(
    rank: int, script: str, flags: tuple, gpus: int, envs: tuple, changes: tuple
) -> RankLog:
    path, log = ROOT / script, RankLog()
    if script in (CONVERTED, *EXAMPLES):
        original = path.with_name(path.name.replace("_ddp.py", ".py"))
        source = apply_steps.versions_of(original)[-1]
    else:
        source = path.read_text()
    source = replace_once(source, *changes)
    os.environ.update(envs[rank])
    os.chdir(scratch_folder())
    Path("data/MNIST").mkdir(parents=True)
    Path("data/MNIST/raw").symlink_to(ROOT / "common" / "digits")  # where the classifier looks
    pretend_gpus(gpus, log)
    sys.argv, sys.path[0:0] = [script, *flags], [str(path.parent)]
    code, out = compile(source, str(path), "exec"), StringIO()
    try:
        with spawned_as(rank), redirect_stdout(out):
            names = {"__name__": "__main__", "__file__": str(path)}
            run_and_note_lines(code, names, log.lines)
    except SystemExit as end:
        log.error = f"exit status {end.code}"
    log.output = out.getvalue()
    return log


def rehearse(
    script: str,
    *more_flags: str,
    gpus: int,
    ranks: int | None = None,
    envs: Sequence[dict[str, str]] = (),
    changes: tuple[tuple[str, str], ...] = (),
) -> list[RankLog]:
    """Run a script with its flags, and more, on ranks whose machines have that many GPUs.

    ranks: default two, or one of a script that is one process.
    envs: for each rank, what its launcher says otherwise than torchrun on one machine.
    changes: texts of the script to replace.
    The same rehearsal is made once, and only looked at.
    """
    ranks = ranks or (1 if script in ONE_PROCESS else 2)
    pairs = tuple(tuple(env.items()) for env in envs) or ((),) * ranks
    if script in (MINIMAL, MINIMAL_SINGLE):
        changes += ONE_EPOCH
    return _rehearse_once(ranks, script, (*FLAGS[script], *more_flags), gpus, pairs, changes)


@cache
def _rehearse_once(ranks: int, *args: Any) -> list[RankLog]:
    return run_on_ranks(ranks, _rehearse, *args)
