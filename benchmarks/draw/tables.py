"""The tables of the pages, made from results/; bench.py also prints them after a measurement.

A page holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends; below,
<!-- table: origin of NAME --> tells where its numbers come from. `make pages` writes what is
between, and a test compares it with what is committed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.draw import shm_tables, tour_report, training_tables
from benchmarks.result_files import GPU, MACHINE, Results, load

ORIGIN = "origin of "  # before the name of a table


def origin_of(results: Results) -> str:
    """A program that was needed only once is not kept: the commit has it."""
    text = "Measured on {hardware}, with torch {torch}, {date}."
    if "program" in results["provenance"]:
        text += " The program is in its commit: `git show {commit}:{program}`."
    return text.format(**results["provenance"])


@dataclass(frozen=True)
class Table:
    """make: called with a file of results/, or with a part of it."""

    file: str
    make: Callable[[Results], str]
    parts: tuple[str, ...] = ()  # the keys that lead there

    def results(self) -> Results:
        results = load(self.file)
        for part in self.parts:
            results = results[part]
        return results

    def text(self) -> str:
        return self.make(self.results())

    def origin(self) -> str:
        return origin_of(self.results())


def on_gpu(section: str) -> tuple[str, ...]:
    """Where `make gpu` leaves the results of a section of bench.py."""
    return "steps", section, "results", section


TABLES = {
    "tour": Table("tour", tour_report.learned),
    "repeats": Table("tour", tour_report.repeats),
    "stages": Table(MACHINE, training_tables.stages, ("stages",)),
    "threads": Table("once/threads", training_tables.ratios),
    "reducers": Table("reducers", training_tables.ratios),
    "scaling": Table("once/scaling", training_tables.scaling),
    "local_sgd": Table("once/local_sgd", training_tables.local_sgd),
    "local_sgd_links": Table("once/local_sgd_links", training_tables.local_sgd_links),
    "survive": Table("survive", training_tables.survive),
    "shard": Table("shard", training_tables.shard),
    "shm": Table("shm", shm_tables.sizes),
    "shm_python": Table("shm", shm_tables.python_calls),
    "shm_in_place": Table("once/shm_in_place", shm_tables.in_place),
    "shm_calls": Table("shm", shm_tables.calls),
    "faults": Table("injected_faults", training_tables.faults),
    "formats": Table(GPU, training_tables.formats, on_gpu("formats")),
    "peaks": Table(GPU, training_tables.peaks, on_gpu("peaks")),
    "gloo": Table(GPU, training_tables.gloo, on_gpu("gloo")),
    "pauses": Table("injected_faults", training_tables.pauses, ("pauses",)),
}


def text_of(name: str) -> str:
    """What stands on a page between its comments: `stages`, or `origin of stages`."""
    shown = TABLES[name.removeprefix(ORIGIN)]
    return shown.origin() if name.startswith(ORIGIN) else shown.text()
