"""Name the sections of bench.py: each is a function in this folder with `@section` above it.

A section that a GPU can show has a time there, and its results belong to the machine: `make gpu`
runs it, and bench.py keeps it in the file of the machine. Any other one has a file of its own.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple, TypeVar

from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results

Measure = Callable[[Effort], Results]
Measuring = TypeVar("Measuring", bound=Measure)  # with the other arguments that it may have


class Section(NamedTuple):
    measure: Measure
    seconds_on_gpu: int  # time that `make gpu` allows; 0: measured on the CPU only


SECTIONS: dict[str, Section] = {}


def section(name: str, seconds_on_gpu: int = 0) -> Callable[[Measuring], Measuring]:
    """Decorate what measures a section."""

    def add(measure: Measuring) -> Measuring:
        SECTIONS[name] = Section(measure, seconds_on_gpu)
        return measure

    return add


def find_sections() -> dict[str, Section]:
    """Import every program of this folder; return all sections by name."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"benchmarks.measure.{module.name}")
    return SECTIONS
