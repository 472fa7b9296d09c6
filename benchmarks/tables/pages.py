"""The tables of the pages, made from results/; bench.py also prints them after a measurement.

A page holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends; below,
<!-- table: origin of NAME --> tells where its numbers come from. `make pages` writes what is
between, and a test compares it with what is committed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.result_files import GPU, MACHINE, Results, load
from benchmarks.tables import measurements, puzzles, tour_report

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

    @property
    def section(self) -> str:
        """The name of what has measured it: of its file, or of a part of one."""
        return (self.file, *self.parts)[-1]

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
    "stages": Table(MACHINE, measurements.stages, ("stages",)),
    "threads": Table("once/threads", measurements.ratios),
    "reducers": Table("reducers", measurements.ratios),
    "scaling": Table("once/scaling", measurements.scaling),
    "local_sgd": Table("once/local_sgd", measurements.local_sgd),
    "local_sgd_links": Table("once/local_sgd_links", measurements.local_sgd_links),
    "survive": Table("survive", measurements.survive),
    "shard": Table("shard", measurements.shard),
    "shm": Table("shm", measurements.shm_sizes),
    "shm_python": Table("shm", measurements.shm_python_calls),
    "shm_in_place": Table("once/shm_in_place", measurements.shm_in_place),
    "shm_calls": Table("shm", measurements.shm_calls),
    "faults": Table("injected_faults", measurements.faults),
    "formats": Table(GPU, measurements.formats, on_gpu("formats")),
    "peaks": Table(GPU, measurements.peaks, on_gpu("peaks")),
    "gloo": Table(GPU, measurements.gloo, on_gpu("gloo")),
    "puzzles": Table("puzzles", puzzles.puzzles),
    "pauses": Table("injected_faults", measurements.pauses, ("pauses",)),
}


def text_of(name: str) -> str:
    """What stands on a page between its comments: `stages`, or `origin of stages`."""
    shown = TABLES[name.removeprefix(ORIGIN)]
    return shown.origin() if name.startswith(ORIGIN) else shown.text()
