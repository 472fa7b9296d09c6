"""The tables of the pages: each is a function in this folder with `@table` above it.

A page holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends; below,
<!-- table: origin of NAME --> tells where its numbers come from. `make pages` writes what is
between, and a test compares it with what is committed. bench.py also prints a table after the
measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeVar

from benchmarks.result_files import GPU, Results, load

ORIGIN = "origin of "  # before the name of a table
Make = Callable[[Results], str]
Making = TypeVar("Making", bound=Make)  # with the other arguments that it may have


@dataclass(frozen=True)
class Table:
    """make: called with a file of results/, or with a part of it."""

    make: Make
    file: str
    parts: tuple[str, ...]  # the keys that lead there

    @property
    def section(self) -> str:
        """The name of what has measured it: of its file, or of a part of one."""
        return (self.file, *self.parts)[-1]

    def results(self) -> Results:
        results = load(self.file)
        for part in self.parts:
            results = results[part]
        return results


TABLES: dict[str, Table] = {}


def table(name: str, file: str, *parts: str) -> Callable[[Making], Making]:
    """Decorate what makes a table from this file of results/, or from this part of it."""

    def add(make: Making) -> Making:
        TABLES[name] = Table(make, file, parts)
        return make

    return add


def table_of_gpu(name: str) -> Callable[[Making], Making]:
    """Decorate what makes a table from what `make gpu` has measured with this section."""
    return table(name, GPU, "steps", name, "results", name)


def find_tables() -> dict[str, Table]:
    """Import every program of this folder; return all tables by name."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"benchmarks.tables.{module.name}")
    return TABLES


def origin_of(results: Results) -> str:
    """Say where and when it was measured, and how git shows a program that is no longer kept."""
    text = "Measured on {hardware}, with torch {torch}, {date}."
    if "program" in results["provenance"]:
        text += " The program is in its commit: `git show {commit}:{program}`."
    return text.format(**results["provenance"])


def text_of(name: str) -> str:
    """Return what stands on a page between its comments: `stages`, or `origin of stages`."""
    shown = find_tables()[name.removeprefix(ORIGIN)]
    results = shown.results()
    return origin_of(results) if name.startswith(ORIGIN) else shown.make(results)
