"""Record what a script computes on each rank: the oracle, which does not use prove.

In float64, N ranks must end with the weights of one process that gets the samples of all of them.
Each rank is a fork of this process.
"""

import hashlib
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.nn.functional
import torch.distributed.optim
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

RANKS = 2
SECONDS = 120  # time that the ranks of a script get
MESSAGES = (  # what a script may call to send; DDP sends from C++, which is not counted
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all", "send", "isend"),
    *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
)
fork: Any = multiprocessing.get_context("fork")


@dataclass
class Trace:
    """The trace of a script on one rank."""

    first: list[Tensor] = field(default_factory=list)  # weights of all modules, when first called
    last: list[Tensor] = field(default_factory=list)  # weights of these modules at the end
    weights: list[Tensor] = field(default_factory=list)  # after each optimizer step, as one vector
    draws: list[str] = field(default_factory=list)  # digests of the generators after each step
    samples: list[str] = field(
        default_factory=list
    )  # digests of the samples trained with, in order
    messages: list[int] = field(
        default_factory=lambda: [0]
    )  # calls of collectives before each step
    module: str = ""  # class of the module that was called last in training
    autocast: str = ""  # the format of that forward, if autocast is on
    result: Any = None  # return value of main(), unless run as a program
    printed: str = ""


class FailedError(Exception):
    """The script did not reach its end; the text is the whole output of the rank."""

    @property
    def line(self) -> str:
        """Return the line that names the exception, whose message may have many lines."""
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
        line = (errors or lines)[-1]
        is_alone = "Connection closed by peer" in line
        return "a rank is left alone: does every rank reach each collective?" if is_alone else line


def put_in(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


# Record the trace


class Recorder:
    """Fills the trace of this rank while its script runs."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.modules: list[nn.Module] = []
        self.known: set[int] = set()
        self.depth = 0
        register_module_forward_pre_hook(self.before_forward)
        register_module_forward_hook(self.after_forward)
        register_optimizer_step_post_hook(self.after_step)
        for name in MESSAGES:
            put_in(dist, **{name: self.counted(getattr(dist, name))})

    def counted(self, send: Callable) -> Callable:
        def count_and_send(*args: Any, **options: Any) -> Any:
            self.trace.messages[-1] += 1
            return send(*args, **options)

        return count_and_send

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        self.depth += 1
        if self.depth == 1 and module not in self.modules:
            self.modules.append(module)
            new = [p for p in module.parameters() if id(p) not in self.known]
            self.known |= {id(p) for p in new}
            self.trace.first += [full(p) for p in new]
        if self.depth == 1 and module.training and torch.is_grad_enabled():
            self.trace.module = type(module).__name__
            is_on = torch.is_autocast_enabled("cpu")
            self.trace.autocast = str(torch.get_autocast_dtype("cpu")) if is_on else ""
            batch = next((x for x in inputs if isinstance(x, Tensor)), torch.empty(0))
            self.trace.samples += [digest(row) for row in batch]

    def after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.depth -= 1

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.trace.weights.append(torch.cat([full(p).flatten() for p in parameters]))
        self.trace.draws.append(digest(torch.get_rng_state()))
        self.trace.messages.append(0)

    def take_last_weights(self) -> None:
        unique = {id(p): p for module in self.modules for p in module.parameters()}
        self.trace.last = [full(p) for p in unique.values()]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def full(parameter: Tensor) -> Tensor:
    if torch._C._functorch.is_gradtrackingtensor(parameter):  # torch.func calls the module
        with torch._C._DisableFuncTorch():
            return full(torch._C._functorch.get_unwrapped(parameter))
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


# Run the ranks


@dataclass
class Start:
    """The settings with which the ranks of a script start."""

    world: int
    arguments: tuple[str, ...] = ()  # arguments of the script
    prepare: Callable[[int, int], None] | None = None  # called first, with rank and world
    in_float64: bool = True
    seed: int = 0  # added to the script's own seeds
    as_program: bool = True  # otherwise main() is called, and its result traced


def run_rank(rank: int, folder: Path, start: Start) -> None:
    """Run a rank in this process, and leave a trace, or only a log on failure."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # write to descriptors 1 and 2
    log = os.open(folder / f"log_{rank}", os.O_CREAT | os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    os.chdir(folder / "home")
    world = str(start.world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, RANKS=world)
    sys.argv = ["train.py", *start.arguments]
    torch.set_num_threads(1)
    if start.in_float64:  # autocast leaves float64 as it is
        torch.set_default_dtype(torch.float64)
    set_seed = torch.manual_seed
    put_in(torch, manual_seed=lambda seed: set_seed(seed + start.seed))
    if start.prepare:
        start.prepare(rank, start.world)
    recorder = Recorder()
    meet_in(folder, rank, start.world, recorder)
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            if start.as_program:
                runpy.run_path("train.py", run_name="__main__")
            else:
                main = runpy.run_path("train.py", run_name="not_main").get("main")
                recorder.trace.result = main() if main else None
        join_threads()
        recorder.trace.printed = printed.getvalue()
        torch.save(recorder.trace, folder / f"trace_{rank}.pt")
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream:
                stream.flush()
        os._exit(0)


def join_threads() -> None:
    """As Python does at its end: a thread may still write a file."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def meet_in(folder: Path, rank: int, world: int, recorder: Recorder) -> None:
    """The ranks find each other by a file, and leave their last weights before they part."""
    join, leave = dist.init_process_group, dist.destroy_process_group

    def init_process_group(backend: str, **_: Any) -> None:
        join(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)

    def destroy_process_group() -> None:
        recorder.take_last_weights()
        leave()

    put_in(dist, init_process_group=init_process_group, destroy_process_group=destroy_process_group)
    put_in(torch.multiprocessing, spawn=lambda function, args, nprocs: function(rank, *args))


def traces(script: str, start: Start) -> list[Trace]:
    """Return one Trace per rank. Raises FailedError if a rank fails, or if the ranks hang."""
    with tempfile.TemporaryDirectory(prefix="traces-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        (folder / "home" / "train.py").write_text(script)
        return traces_in(folder, start)


def traces_in(folder: Path, start: Start) -> list[Trace]:
    """The same in a folder of yours, where home/train.py lies, and what the script needs."""
    ranks = [
        fork.Process(target=run_rank, args=(rank, folder, start)) for rank in range(start.world)
    ]
    for process in ranks:
        process.start()
    try:
        wait_for(ranks, folder)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    files = [folder / f"trace_{rank}.pt" for rank in range(start.world)]
    return [torch.load(file, weights_only=False) for file in files]


def wait_for(ranks: list[Any], folder: Path) -> None:
    """Wait until all ranks have left a trace, or the first one fails."""
    running, end = (
        {each.sentinel: rank for rank, each in enumerate(ranks)},
        time.monotonic() + SECONDS,
    )
    while running:
        ended = wait(list(running), timeout=max(0.0, end - time.monotonic()))
        if not ended:
            text = f"the ranks have not ended within {SECONDS} s"
            raise FailedError(f"{text}: does every rank reach each collective?")
        for sentinel in ended:
            rank = running.pop(sentinel)
            if not (folder / f"trace_{rank}.pt").exists():
                raise FailedError((folder / f"log_{rank}").read_text() or f"rank {rank} was ended")


def distance(ranks: Trace, one: Trace) -> float:
    """Return the distance of the last weights, relative to their change in training."""
    of_ranks, of_one, first = (
        torch.cat([tensor.flatten() for tensor in tensors])
        for tensors in (ranks.last, one.last, one.first[: len(one.last)])
    )
    if of_ranks.shape != of_one.shape:
        return float("inf")
    return float((of_ranks - of_one).norm() / (of_one - first).norm())
