"""The tables of the READMEs, made of results; bench.py prints them of what it has just measured.

A README holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends;
`make readme` writes what is between, and a test compares it with what is committed.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from tabulate import tabulate

from timing import RESULTS, SAME, Results

Cell = str | Callable[[Results], object]  # what a column shows of a row: a format, or a function

MACHINE = "amd-epyc-2-cores"  # whose `make bench` the READMEs show
RATIO = "{ratio:.2f} ({ratio_interval[0]:.2f} to {ratio_interval[1]:.2f})"


def load(name: str) -> Results:
    return json.loads((RESULTS / f"{name}.json").read_text())


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def inverse(row: Results) -> str:
    """How many times as fast as the baseline, with the interval."""
    low, high = row["ratio_interval"]
    return f"{1 / row['ratio']:.2f} ({1 / high:.2f} to {1 / low:.2f})"


def table(rows: Iterable[Iterable[object]], *heads: str) -> str:
    return tabulate(rows, heads, "github", disable_numparse=True)


def listed(rows: Mapping[str, Results], columns: Mapping[str, Cell], head: str = "") -> str:
    """A line for each row: its name, and what each column shows of it."""
    lines = []
    for name, row in rows.items():
        cells = [c.format(**row) if isinstance(c, str) else c(row) for c in columns.values()]
        lines.append((name, *cells))
    return table(lines, head, *columns)


def ratios(columns: Mapping[str, Mapping[str, Results]], head: str = "") -> str:
    """A line for each name, and in each column the ratio of its row there."""
    names = next(iter(columns.values()))
    lines = [(n, *(RATIO.format(**rows[n]) for rows in columns.values())) for n in names]
    return table(lines, head, *columns)


def step_parts(results: Results) -> str:
    rows = []
    for name, result in results["steps"].items():
        for on, step in result["steps"].items():
            parts = [f"{ms:.1f}" for ms in result["parts_ms"].get(on, {}).values()]
            rows.append((name, on, f"{step['step_ms']:.1f}", RATIO.format(**step), *parts))
    return table(rows, "model", "on", "step", "ratio", *result["parts_ms"]["1 replica"])


def interpreter_lock(results: Results) -> str:
    lock = results["lock"]
    hows = {
        how: {name: lock[name]["forward"][how] for name in lock} for how in lock["net"]["forward"]
    }
    return ratios(hows, "model")


def links(results: Results) -> str:
    rates = {name: found["variants"] for name, found in results["rates"].items()}
    sent = {name: f"{count / 1e6:.1f}" for name, count in results["sent_bytes_a_step"].items()}
    rows = [
        (name, sent.get(name, ""), *(RATIO.format(**found[name]) for found in rates.values()))
        for name in rates["no limit"]
    ]
    return table(rows, "", "MB sent", *rates)


FAULTS: dict[str, Cell] = {
    "n": "{faults}",
    "wrong": lambda row: row["wrong_resumes"] + row["wrong_ends"],
    "hangs": "{hangs}",
    "orphans": "{orphans}",
    "s to the end": "{end_seconds_median:.1f}",
    "s to resume": "{recovery_seconds_median:.1f} ({recovery_seconds_p95:.1f})",
    "steps lost": "{lost_steps_median:.0f} ({lost_steps_max})",
}


def faults(results: Results) -> str:
    return listed({row["what"]: row for row in results["kinds"].values()}, FAULTS, "fault")


def survive(results: Results) -> str:
    return listed(results["variants"], {"step, ms": "{step_ms:.1f}", "time / 05's": RATIO})


def precision(results: Results) -> str:
    """Images a second in each precision, as a multiple of fp32, and what it learns."""
    models, rows = results["models"], []
    places = {f"{m}, {p}": models[m][p]["variants"] for m in models for p in models[m]}
    for variant in (*results["accuracy"], SAME):
        found = [place.get(variant) for place in places.values()]
        cells = [row and f"{row['images_per_second']:.1f}/s: {inverse(row)}" for row in found]
        learnt = ""
        if accuracy := results["accuracy"].get(variant):
            low, high = min(accuracy["test_accuracies"]), max(accuracy["test_accuracies"])
            learnt = f"{accuracy['median']:.1%} ({low:.1%} to {high:.1%})"
        rows.append((variant, *cells, learnt))
    return table(rows, "", *places, "test accuracy")


def peaks(results: Results) -> str:
    """The most that a step of one process holds at a time, in MiB."""
    models = {n: both["one process"]["variants"] for n, both in results["models"].items()}
    variants = results["accuracy"]
    rows = [(v, *(mib(found[v]["peak_bytes"]) for found in models.values())) for v in variants]
    return table(rows, "", *models)


def switches(results: Results) -> str:
    """Time, what a rank holds, and whether it learns the same."""
    rows, kinds = [], ("gradients and buckets", "optimiser", "hook")
    for name, row in results["variants"].items():
        distance = f"{row['distance']:.0e}" if row["distance"] else "same bits"
        accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
        held = [mib(row["held_bytes"][kind]) for kind in kinds]
        compared = "" if name == "Adam" else distance  # with nothing
        rows.append((name, RATIO.format(**row), *held, compared, accuracy))
    return table(rows, "", "time", *(f"{kind}, MiB" for kind in kinds), "distance", "accuracy")


def sync_batchnorm(results: Results) -> str:
    found = {**results["layers"], "a step of resnet18": results["steps"]}
    columns = {
        how: {name: found[name][how]["variants"]["SyncBatchNorm"] for name in found}
        for how in results["steps"]
    }
    return ratios(columns)


def stages(results: Results) -> str:
    columns: dict[str, Cell] = {"samples/s": "{samples_per_second:,.0f}"}
    columns["times 01 with 1 thread"] = inverse
    return listed(results["variants"], columns)


def timeline(results: Results) -> str:
    """The parts of each stage's step, in ms, and how much of communication is hidden."""
    parts = next(iter(results["stages"].values()))["parts_ms"]
    columns: dict[str, Cell] = {part: f"{{parts_ms[{part}]:.1f}}" for part in parts}
    columns["hidden"] = lambda row: f"{row['hidden_share']:.0%}" if row["from_backward_on"] else ""
    return listed(results["stages"], {"step": "{step_ms:.1f}", **columns}, "ms")


def ways_to_hold_less(results: Results) -> str:
    first = max(next(iter(results["ways"].values()))["peak_bytes"])
    columns: dict[str, Cell] = {
        "peak, MiB": lambda way: mib(max(way["peak_bytes"])),
        "": lambda way: f"{max(way['peak_bytes']) / first - 1:+.0%}",
        "predicted, MiB": lambda way: mib(way["predicted_bytes"]),
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


def peers(results: Results) -> str:
    until, speed = "{target_seconds:.0f} ({target_epochs})", "{samples_per_second:,.0f}"
    columns: dict[str, Cell] = {"samples/s": speed, "time / 04's": RATIO}
    columns["start-up, s"] = "{start_up_seconds:.1f}"
    target = f"s to {results['settings']['target']:.0%} (epochs)"
    columns[target] = lambda row: until.format(**row) if row["target_seconds"] else ""
    return listed(results["variants"], columns)


def peers_sample(results: Results) -> str:
    rows = [(what, f"{us:.0f}") for what, us in results["us_a_sample"].items()]
    return table(rows, "one thread", "µs a sample")


def origin(results: Results) -> str:
    where = results["provenance"]
    return f"Measured on {where['hardware']}, with torch {where['torch']}, {where['date']}."


def reducers(results: Results) -> str:
    return ratios({name: found["variants"] for name, found in results["models"].items()})


MADE: dict[str, tuple] = {  # of each section: its committed results, and its tables
    "stages": (MACHINE, stages),
    "timeline": (MACHINE, timeline),
    "process_memory": (MACHINE, ways_to_hold_less),
    "scaling": ("04_scaling", scaling),
    "data_parallel": ("02_data_parallel", step_parts, interpreter_lock),
    "reducers": ("03_reducers", reducers),
    "precision": ("05_precision", precision, peaks),
    "switches": ("05_switches", switches),
    "sync_batchnorm": ("05_sync_batchnorm", sync_batchnorm),
    "links": ("04_links", links),
    "peers": ("peers", peers, peers_sample),
    "survive": ("survive", survive),
    "faults": ("faults", faults),
}


def committed(section: str, make: Callable[[Results], str]) -> str:
    results = load(MADE[section][0])
    return make(results[section] if MADE[section][0] == MACHINE else results)


TABLES: dict[str, Callable[[], str]] = {}
for section, (file, *made) in MADE.items():
    TABLES[f"origin of {section if file == MACHINE else file}"] = partial(
        committed, section, origin
    )
    TABLES |= {make.__name__: partial(committed, section, make) for make in made}


def shown(section: str, results: Results) -> list[str]:
    """The tables of what a section has found."""
    return [make(results) for make in MADE.get(section, ("",))[1:]]
