"""Says whether an exercise is solved. The README of its stage tells what to mend.

python tests/check_exercise.py 03  # exit status 0: right, 1: wrong, 2: a wrong call
"""

import re
import resource
import runpy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import extract_tb
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from common.options import Parser, UsageError, exit_on, float_at_least
from common.ranks import run_ranks


class Answer(NamedTuple):
    question: str
    answer: Any
    expected: Any


def mean_loss(solve: Callable) -> Iterator[Answer]:
    for means, sizes in (([1.0, 2.0], [3, 3]), ([0.5, 0.25, 2.0], [120, 120, 57])):
        losses = [mean for mean, size in zip(means, sizes, strict=True) for _ in range(size)]
        yield Answer(f"mean_loss({means}, {sizes})", solve(means, sizes), sum(losses) / len(losses))


def split_batch(solve: Callable) -> Iterator[Answer]:
    for samples, replicas in ((8, 4), (5, 4), (30, 8), (2, 3)):
        sizes = [len(part) for part in torch.zeros(samples).chunk(replicas)]
        yield Answer(f"split_batch({samples}, {replicas})", solve(samples, replicas), sizes)


def all_reduces(function: Callable, *args: object) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function(*args)
    return sum(event.name.startswith("c10d::allreduce") for event in profiler.events())


def average_gradients(solve: Callable) -> Iterator[Answer]:
    model = nn.ParameterList([torch.zeros(size) for size in (1, 2, 1, 2, 1, 2, 1, 2, 1)])
    for place, parameter in enumerate(model[:8]):  # the last one has no gradient
        parameter.grad = torch.full_like(parameter, 2.0 * place * (1 + 2 * dist.get_rank()))
    sent = all_reduces(solve, model)
    means = [parameter.grad.mean().item() for parameter in model[:8]]
    yield Answer("means of 0, 2, .. 14 and 0, 6, .. 42", means, [4.0 * place for place in range(8)])
    yield Answer("the number of all-reduces for 8 gradients", sent, 1)


def local_samples(solve: Callable) -> Iterator[Answer]:
    for ranks, batch in ((2, 8), (3, 6)):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
        parts = [solve(order, rank, ranks) for rank in range(ranks)]
        for first in range(0, 24, batch):
            local_batch = slice(first // ranks, (first + batch) // ranks)
            samples = {sample for part in parts for sample in part[local_batch]}
            expected = sorted(order[first : first + batch])
            yield Answer(f"the global batch of {ranks} ranks", sorted(samples), expected)


def accumulate(solve: Callable) -> Iterator[Answer]:
    torch.manual_seed(0)
    layer = nn.Linear(2, 2, bias=False).double()
    images, labels = torch.randn(12, 2).double(), torch.arange(12) % 2
    (expected,) = torch.autograd.grad(F.cross_entropy(layer(images), labels), [layer.weight])
    local = slice(dist.get_rank(), None, dist.get_world_size())
    sent = all_reduces(solve, DistributedDataParallel(layer), images[local], labels[local], 3)
    gradient = layer.weight.grad.flatten().tolist()  # type: ignore[union-attr]
    yield Answer("the gradient", gradient, expected.flatten().tolist())
    yield Answer("the number of all-reduces for 3 micro-batches", sent, 1)


def safe_save(solve: Callable) -> Iterator[Answer]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        for step in (1, 2):
            solve({"step": step, "weights": torch.zeros(50_000)}, path)
            yield Answer(f"the step in the file after save {step}", torch.load(path)["step"], step)
        # From here on, no file can grow beyond 40 kB: a write fails half-way, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        outcome, content = "an error", "nothing that torch.load can read"
        with suppress(OSError, RuntimeError):  # RuntimeError: torch.save's
            solve({"step": 3, "weights": torch.zeros(50_000)}, path)
            outcome = "no error"
        with suppress(Exception):  # whatever a damaged file makes torch.load raise
            content = f"step {torch.load(path)['step']}"
        yield Answer(
            "a full disk in save 3", f"{outcome}, file: {content}", "an error, file: step 2"
        )


def global_loss(solve: Callable) -> Iterator[Answer]:
    for counts in ((31, 12), (5, 0), (0, 0)):
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        losses = [torch.arange(n).double() + 10 * rank for rank, n in enumerate(counts)]
        local = losses[dist.get_rank()]
        mean = solve((weight * local).sum(), torch.tensor(len(local)))
        (grad,) = torch.autograd.grad(mean, weight)
        dist.all_reduce(grad)
        expected = torch.cat(losses).sum().item() / max(1, sum(counts))
        yield Answer(f"mean gradient of ranks with {counts} objects", grad.item() / 2, expected)


EXERCISES = {  # cases, folder of exercise.py, ranks
    "01": (mean_loss, "01_single_gpu", 1),
    "02": (split_batch, "02_data_parallel", 1),
    "03": (average_gradients, "03_ddp_manual_allreduce", 2),
    "04": (local_samples, "04_ddp_torchrun", 1),
    "05": (accumulate, "05_amp_syncbn", 2),
    "survive": (safe_save, "beyond/survive", 1),
    "convert": (global_loss, "beyond/convert", 2),
}


def judge(rank: int, cases: Callable[[Callable], Iterator[Answer]], file: str) -> str:
    """What is wrong with the answers of this file; empty if nothing is."""
    try:
        for question, answer, expected in cases(runpy.run_path(file)[cases.__name__]):
            if answer != pytest.approx(expected):
                return f"{question}: got {answer}, expected {expected}"
    except Exception as error:
        here = [x.lineno for x in extract_tb(error.__traceback__) if x.filename == file]
        return f"{type(error).__name__}{f' in line {here[-1]}' if here else ''}: {error}"
    return ""


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("stage", choices=EXERCISES, help="whose exercise")
    parser.add_argument("--file", type=Path, help="judge this file, not exercise.py of the stage")
    parser.add_argument("--seconds", default=60, type=float_at_least(0), help="time limit")
    args = parser.parse_args()
    cases, folder, ranks = EXERCISES[args.stage]
    name = f"{folder}/exercise.py"
    file = str((args.file or Path(__file__).parents[1] / name).resolve(strict=True))
    try:
        faults = run_ranks(ranks, judge, cases, file, seconds=args.seconds, quiet=True)
    except Exception as error:  # the time limit, or a rank ended
        faults = [f"{error}, expected an answer"]
    # A broken connection is a consequence, so the other faults come first.
    faults = sorted(filter(None, faults), key=lambda text: "gloo/transport" in text)
    line = " ".join(["wrong:", *faults[0].split()] if faults else ["right"])
    print(f"{name}:", re.sub(r"(\.\d{4})\d+", r"\1", line))  # four places will do
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    with exit_on(UsageError, FileNotFoundError):
        main()
