"""The tables of the pages, made from results/; bench.py also prints them after a measurement.

A page holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends;
`make readme` writes what is between, and a test compares it with what is committed.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import mean
from typing import Any

from tabulate import tabulate

from local_steps import slowdowns
from timing import SAME, Results, load

MACHINE = "amd-epyc-2-cores"  # the pages show its `make bench`
SHARDED = ("parameters", "gradients", "optimizer state")  # what each rank of shard/ holds
RATIO = "{ratio:.2f} ({ratio_interval[0]:.2f} to {ratio_interval[1]:.2f})"


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def inverse(row: Results) -> str:
    """How many times as fast as the baseline, with the interval."""
    low, high = row["ratio_interval"]
    return f"{1 / row['ratio']:.2f} ({1 / high:.2f} to {1 / low:.2f})"


def table(rows: Iterable[Iterable[object]], *heads: str) -> str:
    return tabulate(rows, heads, "github", disable_numparse=True)


def listed(rows: Mapping[str, Results], columns: Mapping[str, Any], head: str = "") -> str:
    """One line per row: its name, then each column by its format or its function."""
    shows = [text.format_map if isinstance(text, str) else text for text in columns.values()]
    return table([(n, *(show(row) for show in shows)) for n, row in rows.items()], head, *columns)


def ratios(columns: Mapping[str, Mapping[str, Results]], head: str = "") -> str:
    names = dict.fromkeys(name for rows in reversed([*columns.values()]) for name in rows)
    cells = {n: [RATIO.format(**r[n]) if n in r else "" for r in columns.values()] for n in names}
    lines = [(name, *row) for name, row in cells.items()]
    return table(lines, head, *columns)


def threads(results: Results) -> str:
    models = {name: found["forward"] for name, found in results["models"].items()}
    columns = {how: {n: models[n][how] for n in models} for how in models["net"]}
    return ratios(columns, "model")


def faults(results: Results) -> str:
    columns = {
        **{"n": "{faults}", "wrong": lambda row: row["wrong_resumes"] + row["wrong_ends"]},
        **{"hangs": "{hangs}", "orphans": "{orphans}"},
        "s to the end": "{end_seconds_median:.1f}",
        "s to resume": "{recovery_seconds_median:.1f} ({recovery_seconds_p95:.1f})",
        "steps lost": "{lost_steps_median:.0f} ({lost_steps_max})",
    }
    return listed({row["what"]: row for row in results["kinds"].values()}, columns, "fault")


def pauses(results: Results) -> str:
    columns = {
        **{"n": "{faults}", "wrong": lambda row: row["wrong_resumes"] + row["wrong_ends"]},
        **{"hangs": "{hangs}", "orphans": "{orphans}", "s to the end": "{end_seconds_median:.1f}"},
    }
    rows = results["pauses"]["kinds"].values()
    return listed({row["what"]: row for row in rows}, columns, "pause")


def origin_of_pauses(results: Results) -> str:
    return origin(results["pauses"])


def survive(results: Results) -> str:
    return listed(results["variants"], {"step, ms": "{step_ms:.1f}", "time / 05's": RATIO})


def shard(results: Results) -> str:
    whole, rows = results["parameter_bytes"], []
    for name, step in results["variants"].items():
        held = results["held_bytes"].get(name)  # A/A is measured in time only
        kinds = [held[kind] / whole for kind in SHARDED] if held else []
        cells = [*kinds, sum(kinds), results["sent_multiples"][name]] if held else [None] * 5
        numbers = ["" if cell is None else f"{cell:.2f}" for cell in cells]
        rows.append((name, *numbers, RATIO.format(**step)))
    return table(rows, "", *SHARDED, "together", "sent", "time / DDP's")


def local_sgd(results: Results) -> str:
    """DDP's accuracy, and how many points the other methods are away from it: mean and spread."""
    names, rows = results["trainings"][0]["methods"], []
    for how in names:
        cells = []
        for each in results["trainings"]:
            found = each["methods"].get(how)
            if how == "DDP":
                cells.append(f"{mean(found['test_accuracies']):.2%}")
            else:
                cells.append(found and "{points:+.2f} ± {points_stdev:.2f}".format_map(found))
        rows.append((how, *cells))
    return table(
        rows,
        "the ranks talk",
        *("{model}, {ranks} ranks".format_map(each) for each in results["trainings"]),
    )


def local_sgd_links(results: Results) -> str:
    """Measured ratios, and beside them those that alpha_beta.py computes from a step's time."""
    columns: dict[str, Mapping[str, str]] = {}
    for link, found in results["links"].items():
        variants = found["variants"]
        columns[link] = {name: RATIO.format(**row) for name, row in variants.items()}
        if (gbit := link.removesuffix(" Gbit/s")) != link:
            computed = slowdowns(next(iter(variants.values()))["step_ms"], float(gbit))
            columns[f"{link}, computed"] = {name: f"{each:.2f}" for name, each in computed.items()}
    names = next(iter(columns.values()))
    rows = [(name, *(cells.get(name, "") for cells in columns.values())) for name in names]
    return table(rows, "", *columns)


def precision(results: Results) -> str:
    models, rows = results["models"], []
    places = {f"{m}, {p}": models[m][p]["variants"] for m in models for p in models[m]}
    for variant in (*results["accuracy"], SAME):
        found = [place.get(variant) for place in places.values()]
        cells = [row and f"{row['images_per_second']:.1f}/s: {inverse(row)}" for row in found]
        learned = ""
        if (accuracy := results["accuracy"].get(variant)) and accuracy["test_accuracies"]:
            low, high = min(accuracy["test_accuracies"]), max(accuracy["test_accuracies"])
            learned = f"{accuracy['median']:.1%} ({low:.1%} to {high:.1%})"
        rows.append((variant, *cells, learned))
    return table(rows, "", *places, "test accuracy")


def peaks(results: Results) -> str:
    models = [places["one process"]["variants"] for places in results["models"].values()]
    rows = [(v, *(mib(each[v]["peak_bytes"]) for each in models)) for v in results["accuracy"]]
    return table(rows, "", *results["models"])


def stages(results: Results) -> str:
    columns = {"samples/s": "{samples_per_second:,.0f}", "times 01 with 1 thread": inverse}
    return listed(results["variants"], columns)


def ways_to_hold_less(results: Results) -> str:
    first = max(results["ways"]["DDP with Adam"]["peak_bytes"])
    columns = {
        "peak, MiB": lambda way: mib(max(way["peak_bytes"])),
        "": lambda way: f"{max(way['peak_bytes']) / first - 1:+.0%}",
    }
    return listed(results["ways"], columns)


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


def origin(results: Results) -> str:
    text = "Measured on {hardware}, with torch {torch}, {date}."
    return text.format(**results["provenance"])


def reducers(results: Results) -> str:
    return ratios({name: found["variants"] for name, found in results["models"].items()})


MADE: dict[str, tuple] = {  # of each section: its committed results, and its tables
    "stages": (MACHINE, stages),
    "process_memory": (MACHINE, ways_to_hold_less),
    "scaling": ("04_scaling", scaling),
    "threads": ("02_threads", threads),
    "reducers": ("03_reducers", reducers),
    "precision": ("05_precision", precision, peaks),
    "local_sgd": ("04_local_sgd", local_sgd),
    "local_sgd_links": ("04_local_sgd_links", local_sgd_links),
    "survive": ("survive", survive),
    "shard": ("shard", shard),
    "faults": ("faults", faults, pauses),
}


def from_results(section: str, make: Callable[[Results], str]) -> str:
    results = load(MADE[section][0])
    return make(results[section] if MADE[section][0] == MACHINE else results)


TABLES: dict[str, Callable[[], str]] = {}
for section, (file, *made) in MADE.items():
    where = section if file == MACHINE else file
    TABLES[f"origin of {where}"] = partial(from_results, section, origin)
    TABLES |= {make.__name__: partial(from_results, section, make) for make in made}
TABLES["origin of pauses"] = partial(from_results, "faults", origin_of_pauses)


def shown(section: str, results: Results) -> list[str]:
    return [make(results) for make in MADE.get(section, ("",))[1:]]
