"""The tables of the pages, made from results/; bench.py also prints them after a measurement.

A page holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends; below,
<!-- table: origin of NAME --> tells where its numbers come from. `make pages` writes what is
between, and a test compares it with what is committed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tabulate import tabulate

from benchmarks.draw import tour_report
from benchmarks.result_files import MACHINE, Results, load

ORIGIN = "origin of "  # before the name of a table
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


def records(rows: Iterable[Results], columns: Mapping[str, str]) -> str:
    """A line for each row; the columns are formats of its numbers."""
    lines = [[cell.format_map(row) for cell in columns.values()] for row in rows]
    return tabulate(lines, [*columns], "github", disable_numparse=True)


def stages(results: Results) -> str:
    def times_baseline(row: Results) -> str:
        low, high = row["ratio_interval"]  # of times, not of speeds
        return f"{1 / row['ratio']:.2f} ({1 / high:.2f} to {1 / low:.2f})"

    rows = {row["label"]: row for row in results["variants"].values()}
    several = {label: row for label, row in rows.items() if "share" in row}
    share = "{share:.0%} ({share_interval[0]:.0%} to {share_interval[1]:.0%})"
    return table(
        {
            "samples/s": column(rows, "{samples_per_second:,.0f}"),
            "times 01": column(rows, times_baseline),
            "share of the ceiling": column(several, share),
        }
    )


def scaling(results: Results) -> str:
    """All steps of DDP that were predicted and measured."""
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
    return records(results["rows"], columns)


def ratios(results: Results) -> str:
    """A column for each model."""
    models = results["models"].items()
    return table({name: column(model["variants"], RATIO) for name, model in models})


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
    for link, row in results["links"].items():
        columns[link] = column(row["variants"], RATIO)
        columns[f"{link}, computed"] = column(row["computed"], "{:.2f}".format)
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


JUDGED = {
    "n": "{faults}",
    "wrong": "{wrong}",
    "hangs": "{hangs}",
    "orphans": "{orphans}",
    "s to the end": "{end_seconds_median:.1f}",
}
RESUMED = {
    "s to resume": "{recovery_seconds_median:.1f} ({recovery_seconds_p95:.1f})",
    "steps lost": "{lost_steps_median:.0f} ({lost_steps_max})",
}


def judged(results: Results) -> list[Results]:
    """What became of the runs, by what was done to them."""
    rows = results["kinds"].values()
    return [{**row, "wrong": row["wrong_resumes"] + row["wrong_ends"]} for row in rows]


def faults(results: Results) -> str:
    return records(judged(results), {"fault": "{what}", **JUDGED, **RESUMED})


def pauses(results: Results) -> str:
    return records(judged(results), {"pause": "{what}", **JUDGED})


def size_text(size: int) -> str:
    return f"{size // 2**10} KiB" if size < 2**20 else f"{size // 2**20} MiB"


def shared_memory(results: Results) -> str:
    """A line for each size of an all-reduce, beside the copy that it cannot outrun."""
    rows = []
    for row in results["rows"]:
        times_gloo, share = row["gloo_us"] / row["shm_us"], row["limit_us"] / row["shm_us"]
        size = size_text(row["bytes"])
        rows.append({**row, "size": size, "times_gloo": times_gloo, "share": share})
    columns = {
        "size": "{size}",
        "n": "{n}",
        "limit, µs": "{limit_us:,.1f}",
        "gloo, µs": "{gloo_us:,.0f}",
        "shm, µs": "{shm_us:,.1f}",
        "its quartiles": "{shm_us_quartiles[0]:,.1f} to {shm_us_quartiles[1]:,.1f}",
        "gloo / shm": "{times_gloo:.1f}",
        "of the limit": "{share:.2f}",
    }
    return records(rows, columns)


def shared_memory_python(results: Results) -> str:
    """What a call costs where nobody waits and hardly a byte moves."""
    columns = {"an all_reduce of 4 KiB": "{what}", "n": "{n}", "µs": "{us:.1f}"}
    columns["its quartiles"] = "{us_quartiles[0]:.1f} to {us_quartiles[1]:.1f}"
    return records(results["python"], columns)


def shared_memory_in_place(results: Results) -> str:
    rows = [{**row, "size": size_text(row["bytes"])} for row in results["rows"]]
    columns = {
        "size": "{size}",
        "n": "{n}",
        "limit, µs": "{limit_us:,.1f}",
        "fast.c": "{rows_us:,.1f}",
        "tensors in shared memory": "{shared_tensors_us:,.1f}",
        "process_vm_readv": "{process_vm_readv_us:,.1f}",
    }
    return records(rows, columns)


def shared_memory_calls(results: Results) -> str:
    """gloo's time over shm's, of all sizes: the least and the most favorable one."""
    times: dict[str, dict[str, list[float]]] = {}
    for row in results["calls"]:
        of_call = times.setdefault(f"{row['ranks']} ranks", {}).setdefault(row["call"], [])
        of_call.append(row["gloo_us"] / row["shm_us"])
    return table({head: column(calls, extremes) for head, calls in times.items()})


def extremes(times: list[float]) -> str:
    return f"{min(times):.1f} to {max(times):.0f}"


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
    part: str = ""

    def results(self) -> Results:
        results = load(self.file)
        return results[self.part] if self.part else results

    def text(self) -> str:
        return self.make(self.results())

    def origin(self) -> str:
        return origin_of(self.results())


TABLES = {
    "tour": Table("tour", tour_report.learned),
    "repeats": Table("tour", tour_report.repeats),
    "stages": Table(MACHINE, stages, "stages"),
    "threads": Table("threads", ratios),
    "reducers": Table("reducers", ratios),
    "scaling": Table("scaling", scaling),
    "local_sgd": Table("local_sgd", local_sgd),
    "local_sgd_links": Table("local_sgd_links", local_sgd_links),
    "survive": Table("survive", survive),
    "shard": Table("shard", shard),
    "shm": Table("shm", shared_memory),
    "shm_python": Table("shm", shared_memory_python),
    "shm_in_place": Table("shm_in_place", shared_memory_in_place),
    "shm_calls": Table("shm", shared_memory_calls),
    "faults": Table("injected_faults", faults),
    "pauses": Table("injected_faults", pauses, "pauses"),
}


def text_of(name: str) -> str:
    """What stands on a page between its comments: `stages`, or `origin of stages`."""
    table = TABLES[name.removeprefix(ORIGIN)]
    return table.origin() if name.startswith(ORIGIN) else table.text()
