"""List the commands that gpu.py runs, the most valuable first.

On a CPU, they are a rehearsal: each is as small as shows that it runs. A measurement needs no line
here: whatever bench.py can measure on a GPU is in the list.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from benchmarks.measure.sections import find_sections
from benchmarks.variants import STAGE_04, STAGE_05, SURVIVE
from local_ranks.chapters import ROOT

MINIMAL, TEMPLATE = "04_ddp_torchrun/minimal.py", "05_amp_syncbn/template.py"
SHARD, PREFLIGHT = "beyond/shard/train.py", "04_ddp_torchrun/launch/preflight.py"
FIRST_SECTION = "formats"  # what a GPU alone can show, and most readers ask
RUN = "--run-dir={folder}"


@dataclass(frozen=True)
class GpuStep:
    """A command, and how long it may take."""

    name: str
    command: Sequence[str]  # after `python`; {folder} stands for a folder of its own
    seconds: int = 60
    in_folder: bool = False  # started there, because it writes where it is started
    beside_others: bool = False  # nothing is timed: it may run while its neighbors do
    is_refused: bool = False  # the command must fail

    @property
    def text(self) -> str:
        text = " ".join(["python", *self.command])
        return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


def ranks(number: int, script: str, *flags: str) -> tuple[str, ...]:
    """A torchrun on this machine, whether or not its name can be resolved."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"
    return *launcher, f"--nproc-per-node={number}", f"{ROOT}/{script}", *flags


def flags_of(device: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The flags of a run by one rank, and of one by two ranks, which share a GPU over gloo only."""
    if device == "cuda":
        return ("--device=cuda", RUN), ("--backend=gloo", RUN)
    short = ("--device=cpu", RUN, "--epochs=1", "--max-steps=12")
    return short, short


def tests() -> GpuStep:
    jobs = ("-n", str(max(1, min(6, (os.cpu_count() or 1) // 2)))) if find_spec("xdist") else ()
    options = ("-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu")
    command = ("-m", "pytest", *jobs, *options, "--junitxml={folder}/tests.xml", "tests/stages")
    return GpuStep("tests", command, 120)


def programs(device: str) -> list[GpuStep]:
    """What a reader would run: the stages, the roads, prove."""
    here, shared = flags_of(device)
    net, fp16, sharding = "--model=net-bn", "--amp=fp16", "--max-steps=20"
    two_ranks = ("torchrun", "--standalone", "--nproc-per-node=2", STAGE_04, *shared[:2])
    return [
        GpuStep("preflight", ranks(torch.cuda.device_count() or 2, PREFLIGHT), 70),
        GpuStep("04 alone", ranks(1, STAGE_04, *here)),
        GpuStep("04 minimal", ranks(1, MINIMAL), in_folder=True),
        GpuStep("05 on two ranks", ranks(2, STAGE_05, net, *shared)),
        GpuStep("05 in fp16", ranks(2, STAGE_05, net, fp16, *shared)),
        GpuStep("05 template", ranks(1, TEMPLATE, "--amp=bf16", "--sync-bn"), in_folder=True),
        GpuStep("survive", ranks(2, SURVIVE, net, fp16, *here)),
        GpuStep("shard by hand", ranks(2, SHARD, sharding, *shared[:2])),
        GpuStep("shard", ranks(1, SHARD, "--library", sharding, *here[:2])),
        GpuStep("zero", ranks(2, SHARD, "--library", "--shard=optimizer", sharding, *shared[:2])),
        GpuStep("units", ("05_amp_syncbn/formats.py",)),
        GpuStep("fit", ("01_single_gpu/fit.py", "--model=resnet50", "--memory-limit=8GiB")),
        GpuStep("example", (f"{ROOT}/beyond/convert/examples/segmentation.py",), in_folder=True),
        GpuStep("prove", ("-m", "prove", *two_ranks), 90),
    ]


def what_a_gpu_refuses() -> list[GpuStep]:
    """What cannot be rehearsed: only a GPU runs it over nccl, or refuses to."""
    nccl = ("03_ddp_manual_allreduce/collectives.py", "--world-size=1", "--backend=nccl")
    alone = torch.cuda.device_count() == 1  # with more GPUs, nothing is refused
    fsdp = ranks(2, SHARD, "--library", "--backend=gloo", RUN)
    return [
        GpuStep("collectives over nccl", nccl),
        GpuStep("FSDP over gloo", fsdp, is_refused=True),
        GpuStep("two ranks over nccl", ranks(2, STAGE_04, RUN), is_refused=alone),
        GpuStep("two of minimal", ranks(2, MINIMAL), in_folder=True, is_refused=alone),
    ]


def loaders(device: str) -> list[GpuStep]:
    """A step of ResNet-50 whose images one process loads, or eight."""
    here, _ = flags_of(device)
    flags = ["--dataset=synthetic", "--amp=bf16"]
    if device == "cuda":
        flags += ["--model=resnet50", "--image-size=224", "--batch-size=256", "--max-steps=24"]
    else:
        flags += ["--batch-size=8"]
    return [
        GpuStep("one loader", ranks(1, STAGE_05, *flags, *here)),
        GpuStep("8 loaders", ranks(1, STAGE_05, *flags, "--workers=8", *here)),
    ]


def timeline(device: str) -> GpuStep:
    _, shared = flags_of(device)
    images = ("--model=resnet18", "--dataset=synthetic", "--image-size=64", "--max-steps=60")
    recorded = (sys.executable, *ranks(2, STAGE_04, *images, *shared))
    return GpuStep("timeline", (f"{ROOT}/benchmarks/timeline.py", *recorded), in_folder=True)


def measurements(device: str) -> list[GpuStep]:
    """The sections of bench.py that a GPU can show: one is worth most, then the shortest ones."""
    steps = []
    for name, section in find_sections().items():
        flags = [f"--out={{folder}}/{name}.json", f"--device={device}"]
        flags += ["--rounds=1"] if name == "stages" else []  # more rounds would take too long
        flags += [] if device == "cuda" else ["--quick"]
        if section.seconds_on_gpu:
            command = ("benchmarks/bench.py", name, *flags)
            steps.append(GpuStep(name, command, section.seconds_on_gpu))
    return sorted(steps, key=lambda step: (step.name != FIRST_SECTION, step.seconds))


def list_steps(device: str) -> list[GpuStep]:
    here, _ = flags_of(device)
    first, *others = measurements(device)
    only_on_gpus = what_a_gpu_refuses() if device == "cuda" else []
    steps = [
        first,
        tests(),
        # Its report is kept, its numbers are not: they lie one folder deeper.
        GpuStep("tour", ("benchmarks/tour.py", "--ranks=2", *here, f"{RUN}/tour"), 120),
        *(replace(step, beside_others=True) for step in (*programs(device), *only_on_gpus)),
        *loaders(device),
        timeline(device),
        *others,
    ]
    slower = 1 if device == "cuda" else 4  # a laptop has fewer cores
    return [replace(step, seconds=slower * step.seconds) for step in steps]
