"""Is a generated script right? One process with the samples of both ranks gets the same weights.

They are compared after all steps of all epochs.

    python one_process.py 0 300 [--jobs 2]

This knows nothing of prove. Script and reference differ in their data lines only: the reference
makes the loaders of both ranks and joins their samples, one of rank 0, one of rank 1, and so on.
Both run in float64. What torch draws in a step without a generator of all ranks is replaced: row i
of rank r gets the same number, whether it is row i of a batch on two ranks or row 2 i + r on one.
BatchNorm normalizes the rows of each rank by themselves. The control is the script whose loss is
divided by a local count: it must end elsewhere.
"""

import argparse
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.nn.functional
import torch.distributed.optim
from generate import generate, imports_of, nested
from loaders import loader
from tasks import Choices, Task
from torch import Tensor, nn

RANKS = 2
LIMIT = 1e-7  # of the way from the first weights to the last: rounding, after up to 12 steps
SECONDS = 120


class DrawsByRow:
    """Numbers by call, rank and row, in the place of torch's."""

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
        """Of torch.randn or torch.rand: the same, but drawn here."""

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


def put_in(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


def is_common(options: dict) -> bool:
    """A generator that is seeded alike on all ranks, for data and weights."""
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
    """In one process; running statistics are those of rank 0."""
    original = nn.functional.batch_norm

    def batch_norm(x: Tensor, mean: Any, var: Any, *rest: Any, **more: Any) -> Tensor:
        training = rest[2] if len(rest) > 2 else more.get("training", False)
        if not training:
            return original(x, mean, var, *rest, **more)
        first = original(x[0::RANKS], mean, var, *rest, **more)
        other = original(x[1::RANKS], mean.clone(), var.clone(), *rest, **more)
        return torch.stack([first, other], 1).flatten(0, 1)

    put_in(nn.functional, batch_norm=batch_norm)


class Weights:
    """Of all modules that the script calls, when it calls them first and when it ends."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.first: list[Tensor] = []
        self.known: set[int] = set()
        self.depth = 0

    def watch(self) -> None:
        def before(module: nn.Module, inputs: Any) -> None:
            self.depth += 1
            if self.depth == 1 and module not in self.modules:
                self.modules.append(module)
                new = [p for p in module.parameters() if id(p) not in self.known]
                self.known |= {id(p) for p in new}
                self.first += [full(p) for p in new]

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self.depth -= 1

        nn.modules.module.register_module_forward_pre_hook(before)
        nn.modules.module.register_module_forward_hook(after)

    def last(self) -> list[Tensor]:
        unique = {id(p): p for module in self.modules for p in module.parameters()}
        return [full(p) for p in unique.values()]


def full(parameter: Tensor) -> Tensor:
    if torch._C._functorch.is_gradtrackingtensor(parameter):  # torch.func calls the module
        with torch._C._DisableFuncTorch():
            return full(torch._C._functorch.get_unwrapped(parameter))
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def run_rank(rank: int, world: int, text: str, folder: str, command: list[str]) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    home = Path(folder, str(rank))
    home.mkdir()
    os.chdir(home)
    log = os.open("log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    Path("train.py").write_text(text)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), RANKS=str(world))
    sys.argv = ["train.py", *(["--world-size", str(world)] if "--world-size" in command else [])]
    torch.set_default_dtype(torch.float64)
    draws, weights = DrawsByRow(rank, world), Weights()
    draws.install()
    weights.watch()
    if world == 1:
        normalize_by_rank()
    join, leave = dist.init_process_group, dist.destroy_process_group

    def init_process_group(backend: str, **_: Any) -> None:
        join(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)

    def destroy_process_group() -> None:
        torch.save(
            {"first": weights.first, "last": weights.last(), "drew": draws.drew}, "weights.pt"
        )
        leave()

    put_in(dist, init_process_group=init_process_group, destroy_process_group=destroy_process_group)
    put_in(torch.multiprocessing, spawn=lambda function, args, nprocs: function(rank, *args))
    try:
        runpy.run_path("train.py", run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class FailedError(Exception):
    """The script did not come to its end."""


def final_weights(text: str, world: int, command: list[str]) -> dict:
    """Of rank 0, when all ranks have ended."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="one-process-") as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, world, text, folder, command))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(SECONDS)
            if process.is_alive():
                process.kill()
        files = [Path(folder, str(rank), "weights.pt") for rank in range(world)]
        logs = [Path(folder, str(rank), "log").read_text() for rank in range(world)]
        for log, file in zip(logs, files, strict=True):
            if not file.exists():
                raise FailedError("\n".join(logs) if log else "no end")
        results = [torch.load(file) for file in files]
        lines = [line for line in logs[0].splitlines() if line.startswith("epoch ")]
        results[0]["printed"] = [float(word) for line in lines for word in line.split()[1::2]]
        for other in results[1:]:
            both = [
                result | {"last": result["last"][: len(other["last"])]}
                for result in (results[0], other)
            ]
            if not distance(*both) <= LIMIT:
                raise FailedError("the ranks end with different weights")
        return results[0]


def distance(ranks: dict, one: dict) -> float:
    """Between the last weights, in units of the way that they went."""
    of_ranks, of_one, first = (
        torch.cat([tensor.flatten() for tensor in tensors])
        for tensors in (ranks["last"], one["last"], one["first"][: len(one["last"])])
    )
    if of_ranks.shape != of_one.shape:
        return float("inf")
    return float((of_ranks - of_one).norm() / (of_one - first).norm())


class OneStyle(Choices):
    """This style of loader, with one worker count, and rank and world said."""

    def __init__(self, style: str, workers: str) -> None:
        super().__init__(0)
        self.random = SimpleNamespace(random=lambda: 0.0)  # type: ignore[assignment]
        self.wanted = {"data": style, "workers": workers}

    def __call__(self, name: str, *options: str) -> str:
        return self.wanted[name]


DEALT = """
class Numbers(Dataset):
    x = y = torch.arange(64)

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return i, i


train_set, dealt = Numbers(), []
"""


def dealt_samples(style: str, workers: str) -> list[list[list[int]]]:
    """By rank and epoch, the samples that a rank gets from its loader."""
    task = Task([], [], [], "", tensors="train_set.x, train_set.y")
    of_ranks = []
    for rank in range(RANKS):
        own = loader(OneStyle(style, workers), task, "GLOBAL_BATCH // world", False, True)
        loop = [
            *own.epoch,
            "dealt.append([])",
            *nested([*own.index, "dealt[-1] += batch[0].tolist()"], f"for batch in {own.batches}:"),
        ]
        text = "\n".join(
            [
                *own.prelude,
                DEALT,
                f"rank, world, GLOBAL_BATCH, STEPS = {rank}, {RANKS}, 16, 4",
                *own.setup,
                *nested(loop, "for epoch in range(2):"),
            ]
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "deal.py")
            file.write_text("\n".join([*imports_of(text), text]))
            of_ranks.append(runpy.run_path(str(file))["dealt"])
    return of_ranks


def same_numbers(numbers: list[float], others: list[float]) -> bool:
    """As printed with four digits after the point."""
    pairs = list(zip(numbers, others, strict=False))
    return len(numbers) == len(others) and all(abs(own - other) < 2e-4 for own, other in pairs)


class Compared(NamedTuple):
    seed: int
    apart: float  # of the script and its reference
    apart_with_fault: float
    drew: bool
    error: str

    @property
    def right(self) -> bool:
        return not self.error and self.apart <= LIMIT < 1e-4 < self.apart_with_fault


def compared(seed: int, with_fault: bool = True) -> Compared:
    script, reference = generate(seed), generate(seed, reference=True)
    try:
        one = final_weights(reference.text, 1, script.command)
        of_ranks = final_weights(script.text, RANKS, script.command)
        apart_with_fault = float("inf")
        if with_fault:
            faulty = generate(seed, fault=True)
            apart_with_fault = distance(final_weights(faulty.text, RANKS, script.command), one)
    except FailedError as error:
        return Compared(seed, 0.0, 0.0, False, str(error)[-1500:])
    problem = ""
    if not same_numbers(of_ranks["printed"], one["printed"]):
        problem = f"prints {of_ranks['printed']}, and {one['printed']} as one process"
    return Compared(seed, distance(of_ranks, one), apart_with_fault, of_ranks["drew"], problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without-fault", action="store_true", help="no control: a third faster")
    parser.add_argument("--only", type=int, nargs="+", help="these of the seeds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = args.only or range(args.first, args.end)
    context, failed, right = multiprocessing.get_context("fork"), [], []
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for each in pool.map(partial(compared, with_fault=not args.without_fault), seeds):
            if each.right:
                right.append(each)
                continue
            failed.append(each.seed)
            pieces = json.dumps(generate(each.seed).pieces)
            print(f"{each.seed}: {each.apart:.1e}, fault {each.apart_with_fault:.1e} {pieces}")
            print(each.error, flush=True)
    result = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "scripts": len(seeds),
        "right": len(right),
        "with draws": sum(each.drew for each in right),
        "farthest": max(each.apart for each in right),
        "nearest with a fault": min(each.apart_with_fault for each in right),
        "not right": failed,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
