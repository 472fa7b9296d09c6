"""The tables of what was measured, as a page on GitHub holds them."""

from collections.abc import Callable, Iterable, Mapping
from statistics import mean
from typing import Any

from tabulate import tabulate

from benchmarks.result_files import MACHINE, MIB, Results
from benchmarks.tables.pages import table, table_of_gpu
from shm.busy import Ratio
from shm.speed import COLUMNS

Column = Mapping[str, str]  # the cell of each line that has one
SHARDED = ("parameters", "gradients", "optimizer state")  # what each rank of shard/ holds


def table_of_columns(columns: Mapping[str, Column], head: str = "") -> str:
    """The lines are those of the longest column; others may lack some of them."""
    names = max(columns.values(), key=len)
    lines = [[name, *(cells.get(name, "") for cells in columns.values())] for name in names]
    return tabulate(lines, (head, *columns), "github", disable_numparse=True)


def column(rows: Mapping[str, Any], cell: str | Callable[[Any], str]) -> Column:
    """cell: what makes the text of a row, or the format of its numbers."""
    cell_of = cell.format_map if isinstance(cell, str) else cell
    return {name: cell_of(row) for name, row in rows.items()}


def table_of_rows(rows: Iterable[Results], columns: Mapping[str, str]) -> str:
    """A line for each row; the columns are formats of its numbers."""
    lines = [[cell.format_map(row) for cell in columns.values()] for row in rows]
    return tabulate(lines, [*columns], "github", disable_numparse=True)


def size_text(size: int) -> str:
    return f"{size // 2**10} KiB" if size < MIB else f"{size // MIB} MiB"


def ratio(row: Results) -> str:
    """The cell of a ratio: its interval alone where it may be 1."""
    return Ratio(row["ratio"], *row["ratio_interval"]).text()


@table("stages", MACHINE, "stages")
def stages(results: Results) -> str:
    def times_baseline(row: Results) -> str:
        return Ratio(row["ratio"], *row["ratio_interval"]).inverse().text()

    def share(row: Results) -> str:
        return Ratio(row["share"], *row["share_interval"]).text(".0%")

    rows = {row["label"]: row for row in results["variants"].values()}
    several = {label: row for label, row in rows.items() if "share" in row}
    return table_of_columns(
        {
            "samples/s": column(rows, "{samples_per_second:,.0f}"),
            "times 01": column(rows, times_baseline),
            "share of the ceiling": column(several, share),
        }
    )


@table("scaling", "once/scaling")
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
    return table_of_rows(results["rows"], columns)


@table("threads", "once/threads")
@table("reducers", "reducers")
def ratios(results: Results) -> str:
    """A column for each model; the head says which torch this is about."""
    models = results["models"].items()
    columns = {name: column(model["variants"], ratio) for name, model in models}
    version = results["provenance"]["torch"].partition("+")[0]
    return table_of_columns(columns, f"torch {version}")


@table_of_gpu("formats")
def formats(results: Results) -> str:
    """Images per second, and in brackets how many times those of the first row; peaks in GiB."""

    def speed(row: Results) -> str:
        return f"{row['images_per_second']:,.0f} ({1 / row['ratio']:.2f})"

    columns: dict[str, Column] = {}
    for model, found in results["models"].items():
        rows = found["variants"]
        for layout in ("contiguous", "channels_last"):
            head = model if layout == "contiguous" else f"{model}, {layout}"
            marked = {name: row for name, row in rows.items() if f", {layout}" in name}
            columns[head] = column(without(f", {layout}", marked), speed)
        held = {name: row for name, row in rows.items() if ", contiguous" in name}
        if all("peak_bytes" in row for row in held.values()):
            gib = column(held, lambda row: f"{row['peak_bytes'] / 2**30:.1f}")
            columns[f"{model}, GiB"] = without(", contiguous", gib)
    return table_of_columns(columns, "images/s")


def without(part: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace(part, ""): value for name, value in named.items()}


@table_of_gpu("gloo")
def gloo(results: Results) -> str:
    """An all-reduce between two ranks that share a GPU, and how much longer it takes from there."""

    sizes = {size_text(int(size)): rows for size, rows in results["all_reduce"].items()}
    cpu, gpu, same = (
        {size: rows[name] for size, rows in sizes.items() if name in rows}  # no GPU in a rehearsal
        for name in ("cpu", "cuda", "A/A")
    )
    columns = {
        "on the CPU, ms": column(cpu, "{step_ms:.2f}"),
        "on the GPU, ms": column(gpu, "{step_ms:.2f}"),
        "GPU / CPU": column(gpu, ratio),
        "A/A": column(same, ratio),
    }
    return table_of_columns(columns, "size")


@table_of_gpu("peaks")
def peaks(results: Results) -> str:
    rows = [
        {**row, "error": row["rehearsed_bytes"] / row["measured_bytes"] - 1}
        | {kind: row[f"{kind}_bytes"] / MIB for kind in ("rehearsed", "measured")}
        for row in results["rows"]
    ]
    columns = {name: f"{{{name}}}" for name in ("model", "optimizer", "batch")}
    columns |= {"rehearsed, MiB": "{rehearsed:,.1f}", "measured, MiB": "{measured:,.1f}"}
    return table_of_rows(rows, {**columns, "error": "{error:+.1%}"})


@table("survive", "survive")
def survive(results: Results) -> str:
    rows = results["variants"]
    milliseconds = column(rows, "{step_ms:.1f}")
    return table_of_columns({"step, ms": milliseconds, "time / 05's": column(rows, ratio)})


@table("local_sgd", "once/local_sgd")
def local_sgd(results: Results) -> str:
    """DDP's accuracy, and how many points the other methods are away from it: mean and spread."""
    columns = {}
    for training in results["trainings"]:
        methods = training["methods"]
        points = column(methods, "{points:+.2f} ± {points_stdev:.2f}")
        accuracy = mean(methods["DDP"]["test_accuracies"])
        head = "{model}, {ranks} ranks".format(**training)
        columns[head] = {**points, "DDP": f"{accuracy:.2%}"}
    return table_of_columns(columns, "the ranks talk")


@table("local_sgd_links", "once/local_sgd_links")
def local_sgd_links(results: Results) -> str:
    """Measured ratios, and beside them those that step_model.py computes from a step's time."""
    columns: dict[str, Column] = {}
    for link, row in results["links"].items():
        columns[link] = column(row["variants"], ratio)
        columns[f"{link}, computed"] = column(row["computed"], "{:.2f}".format)
    return table_of_columns(columns)


@table("shard", "shard")
def shard(results: Results) -> str:
    """Bytes as multiples of the model's. A/A is measured in time only."""
    multiples: dict[str, dict[str, float]] = {kind: {} for kind in (*SHARDED, "together")}
    for name, held in results["held_bytes"].items():
        for kind in SHARDED:
            multiples[kind][name] = held[kind] / results["parameter_bytes"]
        multiples["together"][name] = sum(multiples[kind][name] for kind in SHARDED)
    multiples["sent"] = results["sent_multiples"]
    columns = {head: column(numbers, "{:.2f}".format) for head, numbers in multiples.items()}
    return table_of_columns({**columns, "time / DDP's": column(results["variants"], ratio)})


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


@table("faults", "injected_faults")
def faults(results: Results) -> str:
    return table_of_rows(judged(results), {"fault": "{what}", **JUDGED, **RESUMED})


@table("pauses", "injected_faults", "pauses")
def pauses(results: Results) -> str:
    return table_of_rows(judged(results), {"pause": "{what}", **JUDGED})


@table("shm", "shm")
def shm_sizes(results: Results) -> str:
    """A line for each size of an all-reduce, beside what it cannot outrun."""
    columns = {head: cell for head, cell in COLUMNS.items() if head not in ("call", "ranks")}
    lines = [[cell(row) for cell in columns.values()] for row in results["rows"]]
    return tabulate(lines, [*columns], "github", disable_numparse=True)


@table("shm_python", "shm")
def shm_python_calls(results: Results) -> str:
    """What a call costs where nobody waits and hardly a byte moves, and the way between cores."""
    line = results["line"]
    rows = list(results["python"])
    if line:
        us = {"us": line["ns"] / 1e3, "us_quartiles": [each / 1e3 for each in line["ns_quartiles"]]}
        rows.insert(0, {"what": "a cache line, to the other core and back", "n": line["n"], **us})
    columns = {"an all_reduce of 4 KiB": "{what}", "n": "{n}", "µs": "{us:.2f}"}
    columns["its quartiles"] = "{us_quartiles[0]:.2f} to {us_quartiles[1]:.2f}"
    return table_of_rows(rows, columns)


@table("shm_in_place", "once/shm_in_place")
def shm_in_place(results: Results) -> str:
    rows = [{**row, "size": size_text(row["bytes"])} for row in results["rows"]]
    columns = {
        "size": "{size}",
        "n": "{n}",
        "fast.c": "{rows_us:,.1f}",
        "tensors in shared memory": "{shared_tensors_us:,.1f}",
        "process_vm_readv": "{process_vm_readv_us:,.1f}",
    }
    return table_of_rows(rows, columns)


@table("shm_calls", "shm")
def shm_calls(results: Results) -> str:
    """gloo's time over shm's, of all sizes: from the least end of an interval to the greatest."""
    ends: dict[str, dict[str, list[float]]] = {}
    for row in (*results["rows"], *results["calls"]):
        of_call = ends.setdefault(f"{row['ranks']} ranks", {}).setdefault(row["call"], [])
        of_call += row["times_gloo"][1:]
    return table_of_columns({ranks: column(row, extremes) for ranks, row in ends.items()})


def extremes(times: list[float]) -> str:
    return f"{min(times):.1f} to {max(times):.0f}"
