"""Is a script right when it is resumed? It is run twice, without prove, and must end the same.

One run is never stopped. The other is stopped when its second epoch begins, or after a number of
steps, and resumed. Both must leave the same weights and the same files, to the bit, and print the
same lines; a fault must change what its about.json says.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from evidence.case import Counted
from evidence.reported import stories
from evidence.resumed import Resumed, resumed_scripts
from evidence.traces import RANKS, FailedError, Start, Trace, join_threads, put_in, traces_in

LIMIT_OPTION = "--stop-after="
ENDS = (".pt", ".pth", ".tar", ".ckpt")  # of files of torch.save


class Stop:
    """Ends the run when it asks for a batch after these steps; 0: when its second epoch begins."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.steps_done = 0
        self.has_trained = False

    def prepare(self, rank: int, world: int) -> None:
        self.rank = rank
        register_optimizer_step_post_hook(self.count)
        iterate = DataLoader.__iter__

        def iterate_until_the_end(loader: DataLoader) -> Iterator:
            if not self.steps and self.has_trained and torch.is_grad_enabled():
                self.end()
            for batch in iterate(loader):
                if self.steps and self.steps_done >= self.steps and torch.is_grad_enabled():
                    self.end()
                yield batch

        backward = torch.Tensor.backward

        def backward_and_note(*args: Any, **options: Any) -> None:
            self.has_trained = True
            backward(*args, **options)

        put_in(DataLoader, __iter__=iterate_until_the_end)
        put_in(torch.Tensor, backward=backward_and_note)

    def count(self, *_: object) -> None:
        self.steps_done += 1

    def end(self) -> None:
        join_threads()
        dist.barrier()  # rank 0 may write one
        printed: Any = sys.stdout
        torch.save(Trace(printed=printed.getvalue()), f"../trace_{self.rank}.pt")
        os._exit(0)


def run(folder: Path, arguments: str, prepare: Callable[[int, int], None] | None) -> list[Trace]:
    return traces_in(folder, Start(RANKS, tuple(shlex.split(arguments)), prepare, in_float64=False))


def newest_checkpoint(home: Path) -> Path:
    """The file or the folder of torch.distributed.checkpoint that was written last."""
    files = [file for end in ENDS for file in home.rglob(f"*{end}")]
    return max(
        [*files, *(file.parent for file in home.rglob(".metadata"))],
        key=lambda path: path.stat().st_mtime_ns,
        default=home,
    )


def contents(home: Path) -> dict[str, Any]:
    """All files that the script has left, by name."""
    found: dict[str, Any] = {}
    for file in sorted(home.rglob("*")):
        name = str(file.relative_to(home))
        if file.is_dir() or name == "train.py" or file.name == ".metadata" or ".py" in name:
            continue
        is_torch = file.suffix in ENDS or file.name.startswith("checkpoint.pt")
        try:
            found[name] = torch.load(file, weights_only=False) if is_torch else file.read_bytes()
        except RuntimeError as error:  # two ranks have written it at the same time
            found[name] = str(error)
    return found


def equal(one: Any, other: Any) -> bool:
    """To the bit, whatever is nested in it."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, torch.nn.Module):
        return equal(one.state_dict(), other.state_dict())
    if isinstance(one, dict):
        return set(one) == set(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def is_within(lines: list[str], others: list[str]) -> bool:
    """Do the others have these lines in this order? The resumed run may say more."""
    rest = iter(others)
    return all(line in rest for line in lines)


def what_changes(script: Resumed) -> str:
    """Compare a run that was stopped and resumed with one that was not."""
    steps = [option for option in script.options if option.startswith(LIMIT_OPTION)]
    stop = Stop(int(steps[0].removeprefix(LIMIT_OPTION)) if steps else 0)
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folders = [Path(name, job) for job in ("straight", "stopped", "resumed")]
        for folder in folders:
            folder.mkdir()
        for folder in folders[:2]:
            (folder / "home").mkdir()
            (folder / "home" / "train.py").write_text(script.script)
        straight, stopped, resumed = folders
        whole = run(straight, "", None)
        first = run(stopped, "", stop.prepare)
        home = (stopped / "home").rename(resumed / "home")
        newest = newest_checkpoint(home).relative_to(home)
        arguments = script.resume.format(checkpoint=newest, folder=newest.parent)
        try:
            second = run(resumed, arguments, None)
        except FailedError:
            return "failure"
        if not all(equal(a.last, b.last) for a, b in zip(whole, second, strict=True)):
            return "weights"
        if not equal(contents(straight / "home"), contents(home)):
            return "files"
    for one, two, three in zip(whole, first, second, strict=True):
        printed = two.printed.splitlines() + three.printed.splitlines()
        if not is_within(one.printed.splitlines(), printed):
            return "printed"
    return "nothing"


def known_scripts() -> dict[str, Resumed]:
    """All scripts of resume that need no prove, and the reported mistakes with their cures."""
    ours = {name: each for name, each in resumed_scripts().items() if each.has_oracle}
    reported = {f"reported/{each.name}": each.resumed() for each in stories("resume")}
    cures = {f"cured/{each.name}": each.resumed(is_cured=True) for each in stories("resume")}
    return {**ours, **reported, **cures}


def compare_with_a_run_that_never_stops(name: str) -> Counted:
    script = known_scripts()[name]
    try:
        changes = what_changes(script)
    except FailedError as error:
        return Counted("not run", False, facts={"error": str(error)[-1500:]})
    is_so = script.changes in (changes, "by chance")
    outcome = f"a stop changes {changes}"
    return Counted(outcome if is_so else f"{outcome}, expected {script.changes}", is_so)
