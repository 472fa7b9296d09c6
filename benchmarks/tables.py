"""The tables of the pages, made from results/; bench.py also prints them after a measurement.

A page holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends;
`make readme` writes what is between, and a test compares it with what is committed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tabulate import tabulate

from measure_local_sgd import slowdowns
from plots import MIB
from timing import AA, Results, load

MACHINE = "amd-epyc-2-cores"  # the pages show its `make bench`
SHARDED = ("parameters", "gradients", "optimizer state")  # what each rank of shard/ holds

RATIO = "{ratio:.2f} ({ratio_interval[0]:.2f} to {ratio_interval[1]:.2f})"

Column = Mapping[str, str]  # the cell of each line that has one


def table(columns: Mapping[str, Column], head: str = "") -> str:
    """The lines are those of the longest column; others may lack some of them."""
    names = max(columns.values(), key=len)
    lines = [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    return tabulate(lines, (head, *columns), "github", disable_numparse=True)


def column(rows: Mapping[str, Any], cell: str | Callable[[Any], str]) -> Column:
    """cell: what makes the text of a row, or the format of its numbers."""
    text_of = cell.format_map if isinstance(cell, str) else cell
    return {name: text_of(row) for name, row in rows.items()}


def speed_ratio(row: Results) -> str:
    """How many times as fast as the baseline, with the interval."""
    low, high = row["ratio_interval"]
    return f"{1 / row['ratio']:.2f} ({1 / high:.2f} to {1 / low:.2f})"


def mib(count: float) -> str:
    return f"{count / MIB:,.0f}"


def stages(results: Results) -> str:
    rows = results["variants"]
    speeds = column(rows, "{samples_per_second:,.0f}")
    return table({"samples/s": speeds, "times 01 with 1 thread": column(rows, speed_ratio)})


def ways_to_hold_less(results: Results) -> str:
    peak_bytes = {name: max(way["peak_bytes"]) for name, way in results["ways"].items()}
    first = peak_bytes["DDP with Adam"]
    changes = column(peak_bytes, lambda peak: f"{peak / first - 1:+.0%}")
    return table({"peak, MiB": column(peak_bytes, mib), "": changes})


def predictions(results: Results) -> list[Results]:
    """All steps of DDP that were predicted and measured; `link` says over what."""
    parts = [("one machine", part) for part in results["machine"]] + [*results["links"].items()]
    return [{"link": link, **row} for link, part in parts for row in part["rows"]]


def scaling(results: Results) -> str:
    columns = {
        "link": "{link}",
        "ranks": "{ranks}",
        "model": "{model}",
        "step": "{how}",
        "alone, ms": "{alone_ms:.1f}",
        "predicted": "{predicted_ms:.1f}",
        "measured": "{measured_ms:.1f}",
        "error": "{error:+.1%}",
    }
    rows = [[text.format(**row) for text in columns.values()] for row in predictions(results)]
    return tabulate(rows, [*columns], "github", disable_numparse=True)


def threads(results: Results) -> str:
    models = {name: column(model["forward"], RATIO) for name, model in results["models"].items()}
    variants = {
        variant: {name: ratios[variant] for name, ratios in models.items()}
        for variant in models["net"]
    }
    return table(variants, "model")


def reducers(results: Results) -> str:
    models = results["models"].items()
    return table({name: column(model["variants"], RATIO) for name, model in models})


def precision(results: Results) -> str:
    def cell(row: Results) -> str:
        return f"{row['images_per_second']:.1f}/s: {speed_ratio(row)}"

    return table(
        {
            f"{model}, {place}": column(row["variants"], cell)
            for model, places in results["models"].items()
            for place, row in places.items()
        }
    )


def peaks(results: Results) -> str:
    columns = {}
    for model, places in results["models"].items():
        rows = places["one process"]["variants"].items()
        columns[model] = {name: mib(row["peak_bytes"]) for name, row in rows if name != AA}
    return table(columns)


def survive(results: Results) -> str:
    rows = results["variants"]
    milliseconds = column(rows, "{step_ms:.1f}")
    return table({"step, ms": milliseconds, "time / 05's": column(rows, RATIO)})


def local_sgd(results: Results) -> str:
    """DDP's accuracy, and how many points the other methods are away from it: mean and spread."""
    columns = {}
    for training in results["trainings"]:
        methods = training["methods"]
        points = column(methods, "{points:+.2f} ± {points_stdev:.2f}")
        accuracy = mean(methods["DDP"]["test_accuracies"])
        head = "{model}, {ranks} ranks".format(**training)
        columns[head] = {**points, "DDP": f"{accuracy:.2%}"}
    return table(columns, "the ranks talk")


def local_sgd_links(results: Results) -> str:
    """Measured ratios, and beside them those that step_model.py computes from a step's time."""
    columns: dict[str, Column] = {}
    for link, timed in results["links"].items():
        variants = timed["variants"]
        columns[link] = column(variants, RATIO)
        if (gbit := link.removesuffix(" Gbit/s")) != link:
            computed = slowdowns(variants["no messages"]["step_ms"], float(gbit))
            columns[f"{link}, computed"] = column(computed, "{:.2f}".format)
    return table(columns)


def shard(results: Results) -> str:
    """Bytes as multiples of the model's. A/A is measured in time only."""
    multiples: dict[str, dict[str, float]] = {kind: {} for kind in (*SHARDED, "together")}
    for name, held in results["held_bytes"].items():
        for kind in SHARDED:
            multiples[kind][name] = held[kind] / results["parameter_bytes"]
        multiples["together"][name] = sum(multiples[kind][name] for kind in SHARDED)
    multiples["sent"] = results["sent_multiples"]
    columns = {head: column(numbers, "{:.2f}".format) for head, numbers in multiples.items()}
    return table({**columns, "time / DDP's": column(results["variants"], RATIO)})


def judged(results: Results) -> dict[str, Column]:
    """What became of the runs, by what was done to them."""
    rows = {row["what"]: row for row in results["kinds"].values()}
    return {
        "n": column(rows, "{faults}"),
        "wrong": column(rows, lambda row: str(row["wrong_resumes"] + row["wrong_ends"])),
        "hangs": column(rows, "{hangs}"),
        "orphans": column(rows, "{orphans}"),
        "s to the end": column(rows, "{end_seconds_median:.1f}"),
    }


def faults(results: Results) -> str:
    rows = {row["what"]: row for row in results["kinds"].values()}
    to_resume = column(rows, "{recovery_seconds_median:.1f} ({recovery_seconds_p95:.1f})")
    lost = column(rows, "{lost_steps_median:.0f} ({lost_steps_max})")
    return table({**judged(results), "s to resume": to_resume, "steps lost": lost}, "fault")


def pauses(results: Results) -> str:
    return table(judged(results), "pause")


def origin(results: Results) -> str:
    text = "Measured on {hardware}, with torch {torch}, {date}."
    return text.format(**results["provenance"])


@dataclass(frozen=True)
class Table:
    """make: called with a file of results/, or with a part of it."""

    file: str
    make: Callable[[Results], str]
    part: str = ""

    def text(self) -> str:
        results = load(self.file)
        return self.make(results[self.part] if self.part else results)


TABLES = {
    "stages": Table(MACHINE, stages, "stages"),
    "ways_to_hold_less": Table(MACHINE, ways_to_hold_less, "process_memory"),
    "scaling": Table("04_scaling", scaling),
    "threads": Table("02_threads", threads),
    "reducers": Table("03_reducers", reducers),
    "precision": Table("05_precision", precision),
    "peaks": Table("05_precision", peaks),
    "local_sgd": Table("local_sgd", local_sgd),
    "local_sgd_links": Table("local_sgd_links", local_sgd_links),
    "survive": Table("survive", survive),
    "shard": Table("shard", shard),
    "faults": Table("faults", faults),
    "pauses": Table("faults", pauses, "pauses"),
}
for shown in list(TABLES.values()):
    TABLES[f"origin of {shown.part or shown.file}"] = Table(shown.file, origin, shown.part)
