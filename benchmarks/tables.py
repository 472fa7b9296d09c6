"""The tables of the pages, made from results/; bench.py also prints them after a measurement.

A page holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends;
`make readme` writes what is between, and a test compares it with what is committed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tabulate import tabulate

from measure_local_sgd_links import slowdowns
from plots import MIB
from timing import AA, Results, load

MACHINE = "amd-epyc-2-cores"  # the pages show its `make bench`
SHARDED = ("parameters", "gradients", "optimizer state")  # what each rank of shard/ holds
RATIO = "{ratio:.2f} ({ratio_interval[0]:.2f} to {ratio_interval[1]:.2f})"


def table(rows: Iterable[Iterable[object]], *heads: str) -> str:
    return tabulate(rows, heads, "github", disable_numparse=True)


def table_of_columns(
    rows: Mapping[str, Results], columns: Mapping[str, Any], head: str = ""
) -> str:
    """One line per row: its name, then each column by its format or its function."""
    cells = [text.format_map if isinstance(text, str) else text for text in columns.values()]
    lines = [(name, *(cell(row) for cell in cells)) for name, row in rows.items()]
    return table(lines, head, *columns)


def ratios(columns: Mapping[str, Mapping[str, Results]], head: str = "") -> str:
    """One column for each model, one line for each variant that any of them has."""
    names = dict.fromkeys(name for rows in reversed([*columns.values()]) for name in rows)
    lines = [
        (name, *(RATIO.format(**rows[name]) if name in rows else "" for rows in columns.values()))
        for name in names
    ]
    return table(lines, head, *columns)


def speed_ratio(row: Results) -> str:
    """How many times as fast as the baseline, with the interval."""
    low, high = row["ratio_interval"]
    return f"{1 / row['ratio']:.2f} ({1 / high:.2f} to {1 / low:.2f})"


def mib(count: float) -> str:
    return f"{count / MIB:,.0f}"


def stages(results: Results) -> str:
    columns = {"samples/s": "{samples_per_second:,.0f}", "times 01 with 1 thread": speed_ratio}
    return table_of_columns(results["variants"], columns)


def ways_to_hold_less(results: Results) -> str:
    first = max(results["ways"]["DDP with Adam"]["peak_bytes"])
    columns = {
        "peak, MiB": lambda way: mib(max(way["peak_bytes"])),
        "": lambda way: f"{max(way['peak_bytes']) / first - 1:+.0%}",
    }
    return table_of_columns(results["ways"], columns)


def predictions(results: Results) -> list[Results]:
    """All steps of DDP that were predicted and measured; `link` says over what."""
    parts = [("one machine", part) for part in results["machine"]] + [*results["links"].items()]
    return [{"link": link, **row} for link, part in parts for row in part["rows"]]


def scaling(results: Results) -> str:
    texts = ["{link}", "{ranks}", "{model}", "{how}", "{alone_ms:.1f}", "{predicted_ms:.1f}"]
    texts += ["{measured_ms:.1f}", "{error:+.1%}"]
    rows = [[text.format(**row) for text in texts] for row in predictions(results)]
    heads = "link", "ranks", "model", "step", "alone, ms", "predicted", "measured", "error"
    return table(rows, *heads)


def threads(results: Results) -> str:
    models = {name: model["forward"] for name, model in results["models"].items()}
    variants = {
        variant: {name: rows[variant] for name, rows in models.items()} for variant in models["net"]
    }
    return ratios(variants, "model")


def reducers(results: Results) -> str:
    return ratios({name: model["variants"] for name, model in results["models"].items()})


def precision(results: Results) -> str:
    places = {
        f"{model}, {place}": row["variants"]
        for model, of_model in results["models"].items()
        for place, row in of_model.items()
    }
    lines = []
    for name in next(iter(places.values())):
        rows = [variants.get(name) for variants in places.values()]
        cells = [row and f"{row['images_per_second']:.1f}/s: {speed_ratio(row)}" for row in rows]
        lines.append((name, *cells))
    return table(lines, "", *places)


def peaks(results: Results) -> str:
    models = [places["one process"]["variants"] for places in results["models"].values()]
    lines = [
        (name, *(mib(variants[name]["peak_bytes"]) for variants in models))
        for name in models[0]
        if name != AA
    ]
    return table(lines, "", *results["models"])


def survive(results: Results) -> str:
    columns = {"step, ms": "{step_ms:.1f}", "time / 05's": RATIO}
    return table_of_columns(results["variants"], columns)


def local_sgd(results: Results) -> str:
    """DDP's accuracy, and how many points the other methods are away from it: mean and spread."""
    trainings = results["trainings"]
    lines = []
    for method in trainings[0]["methods"]:
        rows = [training["methods"].get(method) for training in trainings]
        text = "{points:+.2f} ± {points_stdev:.2f}"
        cells = [row and text.format(**row) for row in rows]
        if method == "DDP":
            cells = [f"{mean(row['test_accuracies']):.2%}" for row in rows]
        lines.append((method, *cells))
    heads = ["{model}, {ranks} ranks".format(**training) for training in trainings]
    return table(lines, "the ranks talk", *heads)


def local_sgd_links(results: Results) -> str:
    """Measured ratios, and beside them those that step_model.py computes from a step's time."""
    columns: dict[str, Mapping[str, str]] = {}
    for link, timed in results["links"].items():
        variants = timed["variants"]
        columns[link] = {name: RATIO.format(**row) for name, row in variants.items()}
        if (gbit := link.removesuffix(" Gbit/s")) != link:
            computed = slowdowns(next(iter(variants.values()))["step_ms"], float(gbit))
            columns[f"{link}, computed"] = {name: f"{each:.2f}" for name, each in computed.items()}
    names = next(iter(columns.values()))
    rows = [(name, *(cells.get(name, "") for cells in columns.values())) for name in names]
    return table(rows, "", *columns)


def shard(results: Results) -> str:
    parameter_bytes, lines = results["parameter_bytes"], []
    for name, step in results["variants"].items():
        held = results["held_bytes"].get(name)  # A/A is measured in time only
        kinds = [held[kind] / parameter_bytes for kind in SHARDED] if held else []
        numbers = [*kinds, sum(kinds), results["sent_multiples"][name]] if held else []
        cells = [f"{number:.2f}" for number in numbers] or [""] * 5
        lines.append((name, *cells, RATIO.format(**step)))
    return table(lines, "", *SHARDED, "together", "sent", "time / DDP's")


JUDGED = {
    "n": "{faults}",
    "wrong": lambda row: row["wrong_resumes"] + row["wrong_ends"],
    "hangs": "{hangs}",
    "orphans": "{orphans}",
    "s to the end": "{end_seconds_median:.1f}",
}


def faults(results: Results) -> str:
    columns = {
        **JUDGED,
        "s to resume": "{recovery_seconds_median:.1f} ({recovery_seconds_p95:.1f})",
        "steps lost": "{lost_steps_median:.0f} ({lost_steps_max})",
    }
    faults_by_name = {row["what"]: row for row in results["kinds"].values()}
    return table_of_columns(faults_by_name, columns, "fault")


def pauses(results: Results) -> str:
    pauses_by_name = {row["what"]: row for row in results["kinds"].values()}
    return table_of_columns(pauses_by_name, JUDGED, "pause")


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
    "local_sgd": Table("04_local_sgd", local_sgd),
    "local_sgd_links": Table("04_local_sgd_links", local_sgd_links),
    "survive": Table("survive", survive),
    "shard": Table("shard", shard),
    "faults": Table("faults", faults),
    "pauses": Table("faults", pauses, "pauses"),
}
for shown in list(TABLES.values()):
    TABLES[f"origin of {shown.part or shown.file}"] = Table(shown.file, origin, shown.part)
