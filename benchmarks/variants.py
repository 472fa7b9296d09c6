"""List the ways to run the stages, for the tour, the benchmarks and the timeline."""

import os
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

import shm
from common.options import UsageError
from local_ranks.chapters import ROOT

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "RANKS")
STAGE_01, STAGE_04 = "01_single_gpu/train.py", "04_ddp_torchrun/train.py"
STAGE_05, SURVIVE = "05_amp_syncbn/train.py", "beyond/survive/train.py"
STAGES = ("01", "02", "03", "04", "05")  # these VARIANTS run a stage as a reader does


class Layout(Enum):
    """Which processes one run has."""

    ONE = "one process"
    RANKS = "several processes that average their gradients"
    APART = "as many processes that never talk"


@dataclass(frozen=True)
class Variant:
    """One way to run a stage, and what a table or a picture must know of it."""

    label: str  # RANKS stands for their number, here and in the command
    stage: str
    command: tuple[str, ...]  # after `python`
    layout: Layout = Layout.ONE
    all_cores: bool = False  # otherwise each process has one thread
    keeps_memory: bool = True  # that its tensors free, see local_ranks/machine.py
    over_shm: bool = False
    bf16: bool = False

    def title(self, world_size: int) -> str:
        return self.label.replace("RANKS", str(world_size))

    @property
    def memory_key(self) -> str:
        """Name the memory.STEP_OPTIONS of this variant: threads and shm do not change memory."""
        return "05-bf16" if self.bf16 else self.stage

    def why_not_on(self, device: str) -> str:
        """Say why this machine cannot run the variant, or nothing if it can."""
        if self.over_shm and (device == "cuda" or sys.platform != "linux"):
            return "shm is for CPUs and Linux"
        if not self.keeps_memory and (device == "cuda" or sys.platform != "linux"):
            return "only glibc's malloc has the choice"
        if self.all_cores and device == "cuda":
            return "the threads of the CPU do not compute"
        if self.all_cores and os.cpu_count() == 1:
            return "there is one core"
        return ""


def ranks_variant(label: str, stage: str, *command: str, **options: bool) -> Variant:
    return Variant(label, stage, command, Layout.RANKS, **options)


SHM = (*TORCHRUN, "-m", "shm")
VARIANTS = {
    "01": Variant("01 one process", "01", (STAGE_01,)),
    "01-malloc": Variant("01, malloc as it comes", "01", (STAGE_01,), keeps_memory=False),
    "01-cores": Variant("01 with all cores", "01", (STAGE_01,), all_cores=True),
    "ceiling": Variant("ceiling: RANKS processes that never talk", "01", (STAGE_01,), Layout.APART),
    "02": Variant("02 DataParallel", "02", ("02_data_parallel/train.py", "--replicas", "RANKS")),
    "03": ranks_variant(
        "03 by hand", "03", "03_ddp_manual_allreduce/train.py", "--world-size", "RANKS"
    ),
    "04": ranks_variant("04 DDP", "04", *TORCHRUN, STAGE_04),
    "04-shm": ranks_variant("04 over shm", "04", *SHM, STAGE_04, over_shm=True),
    "05": ranks_variant("05 DDP, SyncBN", "05", *TORCHRUN, STAGE_05),
    "05-shm": ranks_variant("05 over shm", "05", *SHM, STAGE_05, over_shm=True),
    "05-local-bn": ranks_variant("05, no SyncBN", "05", *TORCHRUN, STAGE_05, "--no-sync-bn"),
    "05-bf16": ranks_variant("05 in bf16", "05", *TORCHRUN, STAGE_05, "--amp", "bf16", bf16=True),
    "survive": ranks_variant("survive", "survive", *TORCHRUN, SURVIVE),
}


def stages_in(flag: str) -> list[str]:
    """Read the flag --stages, as in 03,04."""
    stages = flag.split(",")
    if not set(stages) <= set(STAGES):
        raise UsageError(f"--stages {flag}: expected one or more of {','.join(STAGES)}")
    return stages


def command_of(key: str, world_size: int, device: str = "cpu") -> list[str]:
    """Return the command of a variant after `python`, with paths from the current folder."""
    parts = [part.replace("RANKS", str(world_size)) for part in VARIANTS[key].command]
    parts = [os.path.relpath(ROOT / part) if part.endswith(".py") else part for part in parts]
    return [*parts, *backend_flags(VARIANTS[key].stage, world_size, device)]


def script_of(key: str, world_size: int, device: str = "cpu") -> tuple[list[str], int]:
    """Return the script of a variant with its flags, and how many processes a launcher starts.

    torchrun adds only their number and where they meet, and `-m shm` is a script, too.
    """
    variant = VARIANTS[key]
    command = command_of(key, world_size, device)
    if variant.layout is Layout.APART:
        return command, world_size
    if command[: len(TORCHRUN)] != [part.replace("RANKS", str(world_size)) for part in TORCHRUN]:
        return command, 1
    script = command[len(TORCHRUN) :]
    if script[:2] == ["-m", "shm"]:
        script[:2] = [str(Path(shm.__file__).with_name("__main__.py"))]
    return script, world_size


def backend_flags(stage: str, world_size: int, device: str) -> list[str]:
    """Choose nccl if each rank has a GPU of its own, else gloo, over which ranks can share one."""
    default = {"03": "gloo", "04": "nccl", "05": "nccl"}.get(stage)
    if device == "cpu" or default is None:
        return []
    backend = "nccl" if world_size <= torch.cuda.device_count() else "gloo"
    return ["--backend", backend] if backend != default else []
