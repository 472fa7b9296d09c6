"""What a script of the puzzles computes on each rank: its weights after every step, in float64.

check_answer.py compares these traces; benchmarks/measure/puzzles.py takes the last number of each.
"""

import ast
import hashlib
import json
import os
import re
import runpy
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import local_ranks.chapters  # noqa: F401, it lets this import the programs of convert
from apply_steps import apply
from local_ranks.ranks import RankError, run_ranks

HERE = Path(__file__).parent
EQUAL = 1e-9  # of the length of the weights, in float64: the mistakes change a step by 1e-5 or more
SECONDS = 60  # that the ranks of a script get


class Puzzle(NamedTuple):
    """One entry of puzzles.json."""

    number: int
    script: str
    style: str
    belongs_to: str  # the page that teaches what one must know
    report: str
    mistake: str
    rows: list[str]  # of prove, which the answer turns right
    why_unseen: str  # if no row says WRONG
    measure: str  # what main() returns
    ranks_draw_apart: bool = False  # two ranks draw other random numbers than one
    order_is_free: bool = False  # two ranks may take the samples in another order than one

    @property
    def path(self) -> Path:
        return HERE / self.script

    @property
    def diff(self) -> str:
        return (HERE / "answers" / f"{self.number:02}.diff").read_text()

    @property
    def purpose(self) -> str:
        return ast.get_docstring(ast.parse(self.path.read_text())) or ""

    @property
    def answer(self) -> str:
        """The script without its mistake: the diff, applied."""
        return apply(self.diff, self.path.read_text())


PUZZLES = [Puzzle(**entry) for entry in json.loads((HERE / "puzzles.json").read_text())]


class Trace(NamedTuple):
    """What a script did on one rank."""

    result: float  # of main(): the number that it has printed last
    weights: list[Tensor]  # after each optimizer step, all that it trains as one vector
    draws: list[str]  # after each step, a digest of the state of the random numbers
    samples: list[str]  # a digest of each sample that DDP was trained with
    printed: str


class ScriptError(Exception):
    """The script fails; the text is one line."""


def run_script(rank: int, script: str, in_float64: bool, more: int) -> Trace:
    """On one rank, in a process of its own. more: is added to the seeds that the script sets."""
    set_seed = torch.manual_seed
    torch.manual_seed = lambda seed: set_seed(seed + more)
    if in_float64:
        torch.set_default_dtype(torch.float64)
        torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment, misc]
    weights, draws, samples, printed = [], [], [], StringIO()

    def before_forward(module: nn.Module, inputs: tuple) -> None:
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            batch = next((x for x in inputs if isinstance(x, Tensor)), torch.empty(0))
            samples.extend(hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch)

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        weights.append(torch.cat([p.detach().flatten() for p in parameters]))
        draws.append(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())

    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_post_hook(after_step)
    with redirect_stdout(printed):
        main = runpy.run_path(script, run_name="puzzle").get("main")
        result = main() if main else None
    if not isinstance(result, int | float):
        raise TypeError("main() has to stay, and to return the number that it prints last")
    return Trace(float(result), weights, draws, samples, printed.getvalue())


@contextmanager
def scratch(script: Path) -> Iterator[str]:
    """A copy of the script in a folder of its own, which becomes the current one."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="puzzle-") as folder:
        shutil.copy(script, Path(folder, "train.py"))
        os.chdir(folder)
        try:
            yield "train.py"
        finally:
            os.chdir(before)


def traces(script: Path, ranks: int, in_float64: bool = True, seed: int = 0) -> list[Trace]:
    """Of each rank. Raises ScriptError: the script fails, or its ranks wait for each other."""
    with scratch(script) as name:
        start = (run_script, name, in_float64, 1000 * seed)
        try:
            return run_ranks(ranks, *start, backend=None, seconds=SECONDS, quiet=True)
        except TimeoutError as error:
            raise ScriptError(f"{error}: does every rank reach each collective?") from None
        except RankError as error:
            raise ScriptError(last_error(str(error))) from None


def last_error(report: str) -> str:
    """The line that names the exception: some have a message of many lines."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    line = (errors or lines)[-1]
    is_alone = "Connection closed by peer" in line
    return "a rank is left alone: does every rank reach each collective?" if is_alone else line


@cache
def reference(script: Path) -> Trace:
    """One process in float64, before any change: it averages nothing, so it has no mistake."""
    return traces(script, ranks=1)[0]


def dealt_differently(ranks: list[Trace], one: Trace) -> str:
    """Whether the ranks together take not each sample of one rank once; nothing if they do."""
    if len(ranks[0].weights) != len(one.weights):
        return f"{len(ranks[0].weights)} optimizer steps, expected {len(one.weights)}"
    taken, expected = Counter(x for rank in ranks for x in rank.samples), Counter(one.samples)
    if taken == expected:
        return ""
    left_out, again = (expected - taken).total(), (taken - expected).total()
    return f"of {expected.total()} samples, {left_out} are left out, and {again} come again"


def difference(trace: Trace, right: Trace) -> str:
    """What another rank, or another script, computed else; nothing if they agree."""
    if len(trace.weights) != len(right.weights):
        return f"{len(trace.weights)} optimizer steps, expected {len(right.weights)}"
    for step, (mine, expected) in enumerate(zip(trace.weights, right.weights, strict=True), 1):
        if mine.shape != expected.shape:
            return f"{mine.numel()} weights in step {step}, expected {expected.numel()}"
        apart = (mine - expected).norm() / expected.norm()
        if not apart <= EQUAL:  # nan is not, either
            return f"after step {step} of {len(right.weights)}, the weights differ by {apart:.0e}"
    if not abs(trace.result - right.result) <= EQUAL * abs(right.result):
        return f"the last number is {trace.result:.6g}, expected {right.result:.6g}"
    return ""
