"""A machine that seems to have GPUs: calls of CUDA become calls of the CPU, and are written down.

A rehearsal shows which branches a script takes, and in which order it asks for what. It shows
nothing of what a GPU computes, of its memory, of its streams and of nccl.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from common.chapters import ROOT, load_program
from helpers.local_ranks import run_on_ranks
from helpers.machine import scratch_folder
from helpers.stage_files import replace_once
from helpers.train_stage import spawned_as

TWO_STEPS = ("--device=cuda", "--epochs=1", "--max-steps=2", f"--data-dir={ROOT / 'data'}")
SINGLE = "01_single_gpu/train.py"
BY_HAND = "03_ddp_manual_allreduce/train.py"
DDP, MINIMAL = "04_ddp_torchrun/train.py", "04_ddp_torchrun/minimal.py"
AMP = "05_amp_syncbn/train.py"
SURVIVE, OWN_LOOP = "beyond/survive/train.py", "beyond/survive/own_loop.py"
SHARD = "beyond/shard/train.py"
CONVERTED = "beyond/convert/classifier/classifier_ddp.py"  # which the steps beside it make
EXAMPLES = tuple(
    f"beyond/convert/examples/{name}_ddp.py"
    for name in ("contrastive", "gan", "language", "segmentation")
)
FLAGS = {
    SINGLE: TWO_STEPS,
    BY_HAND: (*TWO_STEPS, "--backend=nccl"),
    DDP: TWO_STEPS,
    MINIMAL: (),
    AMP: (*TWO_STEPS, "--model=net-bn", "--amp=fp16"),
    SURVIVE: (*TWO_STEPS, "--model=net-bn", "--amp=bf16", "--accumulate=2"),
    OWN_LOOP: (".",),  # its run folder
    SHARD: (*TWO_STEPS, "--width=32", "--layers=1", "--batch-size=8"),
    CONVERTED: ("--epochs=1",),
    **dict.fromkeys(EXAMPLES, ()),
}


@dataclass
class RankLog:
    """What one rank asked of its machine. Devices are numbers of GPUs, in order of first use."""

    calls: list[str] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    error: str = ""
    output: str = ""


class NoteGpus(TorchFunctionMode):
    """Notes each GPU that a call of torch names; `cuda` alone is the GPU that was set, else 0."""

    def __init__(self, log: RankLog) -> None:
        self.log, self.current = log, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
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


def pretend_gpus(gpus: int, log: RankLog) -> None:
    """From now on, this process sees that many GPUs."""
    import prove.watch.pretend_gpus

    prove.watch.pretend_gpus.install(gpus)
    join = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **more: Any):
        which = "" if device_id is None else f", device_id {torch.device(device_id).index}"
        log.calls.append(f"join {backend}{which}")
        join(backend, *args, **more)

    notes = NoteGpus(log)
    notes.__enter__()
    dist.init_process_group = init_process_group
    torch.cuda.set_device = notes.set_device
    torch.cuda.current_device = lambda: notes.current
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"{shown}{device.index}")


def _rehearse(
    rank: int, script: str, flags: tuple, gpus: int, envs: list, changes: tuple
) -> RankLog:
    path, log = ROOT / script, RankLog()
    if script == CONVERTED:
        source = load_program("beyond/convert", "apply_steps").scripts()[-1]
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
            exec(code, {"__name__": "__main__", "__file__": str(path)})
    except SystemExit as end:
        log.error = f"exit status {end.code}"
    log.output = out.getvalue()
    return log


def rehearse(
    script: str,
    *more_flags: str,
    gpus: int,
    ranks: int = 2,
    envs: Sequence[dict[str, str]] = (),
    changes: tuple[tuple[str, str], ...] = (),
) -> list[RankLog]:
    """Run a script with its flags, and more, on ranks whose machines have that many GPUs.

    envs: for each rank, what its launcher says otherwise than torchrun on one machine.
    changes: texts of the script to replace.
    """
    envs = envs or [{}] * ranks
    flags = (*FLAGS[script], *more_flags)
    return run_on_ranks(ranks, _rehearse, script, flags, gpus, envs, changes)
