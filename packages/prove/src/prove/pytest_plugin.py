"""The fixture `prove`, for a test that keeps a script right:

    def test_ddp(prove):
        prove("train.py", ranks=2)

pytest finds this module once the package is installed. All else is imported when a test calls the
fixture, so that the tests of other projects start as fast as before.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from prove.api import Result


class ProveFixture:
    """Proves a script, and fails the test with prove's table if it is WRONG or not proven."""

    def __init__(self, rootdir: Path) -> None:
        self.rootdir = rootdir

    def __call__(
        self,
        script: str | os.PathLike[str] | Sequence[str],
        *arguments: str | os.PathLike[str],
        ranks: int = 2,
        cpu: bool | None = None,
        strict: bool = False,
        **options: str | float | bool,
    ) -> Result:
        """Prove a script with its arguments on so many ranks, or a whole command, which is a list.

        A relative path of a script is looked for in the current folder, then in pytest's rootdir,
        and the script runs in the folder that has it. A whole command runs in the current folder.

        cpu: run what is written for GPUs on CPUs; None: if there are fewer GPUs than ranks.
        strict: a warning fails the test, too.
        options: the other options of `python -m prove`, as original="python single.py", batches=8,
        resume="auto" or allow_unproven=True.
        """
        __tracebackhide__ = True
        if not isinstance(script, str | os.PathLike):
            if arguments:
                pytest.fail("prove: a list is a whole command: put the arguments into it", False)
            command, folder = [*map(str, script)], Path.cwd()
        else:
            folder = self.folder_of(script)
            launcher = ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]
            command = [*launcher, *map(str, (script, *arguments))]
        if cpu or (cpu is None and number_of_gpus() < ranks):
            options["cpu"] = True
        return proven(command, options, folder, strict)

    def folder_of(self, script: str | os.PathLike[str]) -> Path:
        """Return the folder in which a path of a script holds, or fail the test."""
        __tracebackhide__ = True
        folders = list(dict.fromkeys((Path.cwd(), self.rootdir)))
        for folder in folders:
            if (folder / script).is_file():
                return folder
        text = f"prove: {script}: no such script"
        if not Path(script).is_absolute():
            beside = f'prove(Path(__file__).with_name("{Path(script).name}"))'
            text += f" in {' or in '.join(map(str, folders))}. If it lies beside the test: {beside}"
        pytest.fail(text, pytrace=False)


def number_of_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def proven(
    command: list[str], options: dict[str, str | float | bool], folder: Path, strict: bool
) -> Result:
    """Return the table of a proof, or fail the test with it."""
    __tracebackhide__ = True
    from prove.api import check
    from prove.errors import NotJudgedError

    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in options.items()
        if value is not False
    ]
    typed = f"python -m prove {shlex.join([*words, *command])}"
    where = "" if folder == Path.cwd() else f"cd {folder} && "
    try:
        result = check(command, *words, strict=strict, cwd=folder)
    except NotJudgedError as error:
        pytest.fail(f"{where}{typed}\n\nnot judged: {error}", pytrace=False)
    is_unproven = result.unproven and not options.get("allow_unproven")
    if result.wrong or is_unproven or (strict and result.warnings):
        pytest.fail(f"{where}{typed}\n\n{result}", pytrace=False)
    return result


@pytest.fixture
def prove(pytestconfig: pytest.Config) -> ProveFixture:
    """Proves a script on several ranks: prove("train.py", ranks=2)."""
    return ProveFixture(pytestconfig.rootpath)
