"""Why DataParallel is slow: the time of each part of a step, and what the interpreter lock costs.

    OMP_NUM_THREADS=1 python benchmarks/data_parallel.py

It measures from_scratch.py on virtual replicas that share the CPU, or a GPU with --device cuda, and
writes results/02_data_parallel.json. The variable keeps each replica to one thread:
torch.set_num_threads tells only the calling thread's OpenMP, and a convolution in a new thread
would use every core.
"""

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import SGD

from common.models import Net
from common.options import Parser, UsageError, usage_errors_exit

from timing import (
    add_device,
    add_effort,
    chapter,
    interleave,
    keep,
    most_rounds,
    now,
    provenance,
    require_device,
    summarize,
    table,
)

by_hand: Any = chapter("02", "from_scratch")

CPU = torch.device("cpu")
PARTS = ("replicate", "scatter", "apply", "gather", "loss", "backward", "update")
REPLICAS = {1: "1 replica", 2: "2 replicas", 4: "4 replicas"}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model and a batch for it."""
    torch.manual_seed(0)
    if name == "net":
        return Net(1, 28, 10, batch_norm=False), torch.randn(120, 1, 28, 28)
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10), torch.randn(32, 3, 32, 32)
    if name == "small operations":  # 500 of them, on a few numbers each
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(500))), torch.randn(8, 8)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.randn(512, 1024)


# --- The parts of a step


def one_device(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> None:
    """The step of stage 01."""
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Step:
    """The step of from_scratch.train_step, with a look at the clock after each part."""

    def __init__(
        self, model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor, replicas: int
    ) -> None:
        self.model, self.optimizer, self.x, self.y = model, optimizer, x, y
        self.devices = [x.device] * replicas
        self.seconds: list[list[float]] = []  # of each step, of each part

    def __call__(self) -> None:
        ticks = [now()]
        replicas = by_hand.replicate(self.model, self.devices)
        ticks.append(now())
        parts = by_hand.scatter(self.devices, self.x)
        ticks.append(now())
        outputs = by_hand.apply(replicas, parts, self.devices)
        ticks.append(now())
        output = by_hand.gather(outputs, self.devices)
        ticks.append(now())
        loss = F.cross_entropy(output, self.y)
        ticks.append(now())
        self.optimizer.zero_grad()
        loss.backward()
        ticks.append(now())
        self.optimizer.step()
        ticks.append(now())
        self.seconds.append([ticks[i + 1] - ticks[i] for i in range(len(PARTS))])

    def parts_ms(self) -> dict[str, float]:
        """The median of each part, without the steps that warm up."""
        columns = zip(*self.seconds[3:], strict=True)
        medians = [round(statistics.median(column) * 1000, 4) for column in columns]
        return dict(zip(PARTS, medians, strict=True))


def measure_step(name: str, device: str, rounds: int, steps: int) -> dict[str, Any]:
    """One device against 1, 2 and 4 replicas on it, and the parts of the latter."""
    model, x = build(name)
    model, x = model.to(device), x.to(device)
    y = torch.randint(10, (len(x),), device=device)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    timed = {name: Step(model, optimizer, x, y, n) for n, name in REPLICAS.items()}
    variants: dict[str, Callable[[], None]] = {
        "one device": lambda: one_device(model, optimizer, x, y),
        **timed,
    }
    summary = summarize(interleave(variants, rounds, steps))
    return {
        "batch": len(x),
        "steps": summary,
        "parts_ms": {replicas: step.parts_ms() for replicas, step in timed.items()},
    }


# --- The interpreter lock


def serve(name: str, half: int, pipe: Connection) -> None:
    """A process that runs the model on its half of the batch whenever it is told to."""
    model, x = build(name)
    part = x.chunk(2)[half]
    while pipe.recv():
        model(part)
        pipe.send(True)


@contextmanager
def two_processes(name: str) -> Iterator[Callable[[], None]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for half in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(name, half, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)

    def run() -> None:
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()

    yield run
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()


def measure_lock(name: str, rounds: int, steps: int) -> dict[str, Any]:
    """The forward of two halves: one after the other, in two threads, in two processes."""
    model, x = build(name)
    parts = by_hand.scatter([CPU] * 2, x)

    def in_turn() -> None:
        for args, _ in parts:
            model(*args)

    with two_processes(name) as in_processes:
        variants = {
            "in turn": in_turn,
            "two threads": lambda: by_hand.apply([model, model], parts, [CPU] * 2),
            "two processes": in_processes,
        }
        return {"batch": len(x), "forward": summarize(interleave(variants, rounds, steps))}


def show(results: dict[str, Any]) -> None:
    for name, result in results["steps"].items():
        print(f"\n{name}, a batch of {result['batch']}: a step, and its parts in ms")
        print(table(result["steps"]))
        rows = [(replicas, *parts.values()) for replicas, parts in result["parts_ms"].items()]
        print(tabulate(rows, ("", *PARTS), floatfmt=".2f"))
    for name, result in results["lock"].items():
        print(f"\n{name}: the forward of two halves of {result['batch'] // 2}")
        print(table(result["forward"]))


def main() -> None:
    parser = Parser(__doc__)
    add_effort(parser, "`net` only, one round, to see that it runs", "few rounds")
    add_device(parser, "all replicas share one GPU; the interpreter lock stays on the CPU")
    args = parser.parse_args()
    require_device(args.device)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise UsageError(
            "a replica must keep to one thread, and set_num_threads does not reach new threads:"
            " try OMP_NUM_THREADS=1 python benchmarks/data_parallel.py"
        )
    rounds, big = min(20, most_rounds(args)), not args.quick
    results = {
        "provenance": provenance(
            args.device,
            command="OMP_NUM_THREADS=1 python benchmarks/data_parallel.py",
            rounds=rounds,
        ),
        "steps": {
            name: measure_step(name, args.device, rounds, steps)
            for name, steps in {"net": 5, "resnet18": 1}.items()
            if big or name == "net"
        },
        "lock": {
            name: measure_lock(name, rounds, steps)
            for name, steps in {"net": 5, "small operations": 5, "big operations": 2}.items()
            if big or name == "net"
        },
    }
    show(results)
    keep(args, "02_data_parallel", results)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
