"""Record what a script computes on each rank: the oracle, which does not use prove.

In float64, N ranks must end with the weights of one process that gets the samples of all of them.
Each rank is a fork of this process. For scripts that draw numbers in a step, what torch draws
without a generator of all ranks can be replaced (`by_row`): row i of rank r gets the same number,
whether it is row i of a batch on two ranks or row 2 i + r on one, and BatchNorm normalizes the rows
of each rank by themselves.
"""

import hashlib
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

RANKS = 2
SECONDS = 120  # time that the ranks of a script get
fork: Any = multiprocessing.get_context("fork")


@dataclass
class Trace:
    """The trace of a script on one rank."""

    first: list[Tensor] = field(default_factory=list)  # weights of all modules, when first called
    last: list[Tensor] = field(default_factory=list)  # weights of these modules at the end
    weights: list[Tensor] = field(default_factory=list)  # after each optimizer step, as one vector
    draws: list[str] = field(default_factory=list)  # digests of the generators after each step
    samples: list[str] = field(default_factory=list)  # digests of the samples that DDP trained with
    result: Any = None  # return value of main(), unless run as a program
    printed: str = ""
    drew: bool = False  # True if some drawn rows were replaced


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


# Draw the same numbers for the same row


class DrawsByRow:
    """Replaces torch's random numbers by numbers that depend on call, rank and row."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.calls = rank, world, 0
        self.drew = False

    def generator(self, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * self.calls + rank)

    def rows(self, draw: Any, shape: tuple[int, ...]) -> Tensor:
        """draw(shape, generator): by row, unless there is a single one for the whole batch."""
        self.calls, self.drew = self.calls + 1, True
        if not shape or shape[0] == 1:
            return draw(shape, self.generator(0))
        if self.world > 1:
            return draw(shape, self.generator(self.rank))
        part = (shape[0] // RANKS, *shape[1:])
        parts = [draw(part, self.generator(rank)) for rank in range(RANKS)]
        return torch.stack(parts, 1).flatten(0, 1)

    def by_row(self, original: Any) -> Any:
        """Replace torch.randn or torch.rand with a function that draws by row."""

        def drawn(*size: Any, **options: Any) -> Tensor:
            if is_common(options):
                return original(*size, **options)
            shape = tuple(size[0]) if size and not isinstance(size[0], int) else size
            return self.rows(lambda s, g: original(s, generator=g), shape)

        return drawn

    def integers_by_row(self, original: Any) -> Any:
        def integers(low: int, high: int, size: Any, **options: Any) -> Tensor:
            if is_common(options):
                return original(low, high, size, **options)
            return self.rows(lambda s, g: original(low, high, s, generator=g), tuple(size))

        return integers

    def permutation_by_row(self, original: Any) -> Any:
        def permutation(n: int, **options: Any) -> Tensor:
            if is_common(options):
                return original(n, **options)
            self.calls, self.drew = self.calls + 1, True
            if self.world > 1:
                return original(n, generator=self.generator(0))
            of_rank = original(n // RANKS, generator=self.generator(0)) * RANKS
            return torch.stack([of_rank + rank for rank in range(RANKS)], 1).flatten()

        return permutation

    def install(self) -> None:
        put_in(torch, randn=self.by_row(torch.randn), rand=self.by_row(torch.rand))
        put_in(torch, randn_like=lambda x: torch.randn(x.shape))
        put_in(torch, randint=self.integers_by_row(torch.randint))
        put_in(torch, randperm=self.permutation_by_row(torch.randperm))
        put_in(nn.functional, dropout=dropout, dropout2d=dropout2d)


def is_common(options: dict) -> bool:
    """Does the call have a generator that all ranks seed alike? Then it stays as it is."""
    generator = options.get("generator")
    return generator is not None and generator.initial_seed() < 10_000


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return x * (torch.rand(x.shape) >= p).to(x.dtype) / (1 - p) if training and p else x


def dropout2d(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training:
        return x
    mask = (torch.rand(*x.shape[:2]) >= p).to(x.dtype) / (1 - p)
    return x * mask[:, :, None, None]


def normalize_by_rank() -> None:
    """Normalize each rank's rows by themselves; keep the running statistics of rank 0."""
    original = nn.functional.batch_norm

    def batch_norm(x: Tensor, mean: Any, var: Any, *rest: Any, **more: Any) -> Tensor:
        training = rest[2] if len(rest) > 2 else more.get("training", False)
        if not training:
            return original(x, mean, var, *rest, **more)
        first = original(x[0::RANKS], mean, var, *rest, **more)
        other = original(x[1::RANKS], mean.clone(), var.clone(), *rest, **more)
        return torch.stack([first, other], 1).flatten(0, 1)

    put_in(nn.functional, batch_norm=batch_norm)


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

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        self.depth += 1
        if self.depth == 1 and module not in self.modules:
            self.modules.append(module)
            new = [p for p in module.parameters() if id(p) not in self.known]
            self.known |= {id(p) for p in new}
            self.trace.first += [full(p) for p in new]
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            batch = next((x for x in inputs if isinstance(x, Tensor)), torch.empty(0))
            self.trace.samples += [digest(row) for row in batch]

    def after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.depth -= 1

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.trace.weights.append(torch.cat([full(p).flatten() for p in parameters]))
        self.trace.draws.append(digest(torch.get_rng_state()))

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
    by_row: bool = False
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
    draws = DrawsByRow(rank, start.world)
    if start.by_row:
        draws.install()
        if start.world == 1:
            normalize_by_rank()
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
        recorder.trace.printed, recorder.trace.drew = printed.getvalue(), draws.drew
        torch.save(recorder.trace, folder / f"trace_{rank}.pt")
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream:
                stream.flush()
        os._exit(0)


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
