"""The tables of the READMEs, made of results/*.json.

    python benchmarks/tables.py

A README holds <!-- table: NAME --> where one begins and <!-- end of table --> where it ends;
`make readme` writes what is between, and a test compares it with what is measured.
"""

import json
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from common.options import Parser

import peers
import predictions
from timing import RESULTS

GITHUB: dict[str, Any] = {"tablefmt": "github", "disable_numparse": True}
MACHINE = "amd-epyc-2-cores"  # whose `make bench` the READMEs show


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def origin(name: str, section: str = "") -> str:
    """Where and when it was measured."""
    where = (load(name)[section] if section else load(name))["provenance"]
    return f"Measured on {where['hardware']}, with torch {where['torch']}, {where['date']}."


def ratio(row: dict[str, Any]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_interval"])


def step_parts() -> str:
    """Stage 02: each step on replicas and its parts, in ms."""
    steps = load("02_data_parallel")["steps"]
    names = steps["net"]["parts_ms"]["1 replica"]
    rows = []
    for name, result in steps.items():
        for on, step in result["steps"].items():
            parts = [f"{ms:.1f}" for ms in result["parts_ms"].get(on, {}).values()]
            rows.append((name, on, f"{step['step_ms']:.1f}", ratio(step), *parts))
    return tabulate(rows, ("model", "on", "step", "ratio", *names), "github", disable_numparse=True)


def interpreter_lock() -> str:
    """Stage 02: the forward of two halves, as a multiple of one after the other."""
    lock = load("02_data_parallel")["lock"]
    rows = [(name, *map(ratio, result["forward"].values())) for name, result in lock.items()]
    return tabulate(rows, ("model", *lock["net"]["forward"]), "github", disable_numparse=True)


def reducers() -> str:
    """Stage 03: a step with each reducer, as a multiple of a step that only computes."""
    models = load("03_reducers")["models"]
    rows = [
        (variant, *(ratio(found["variants"][variant]) for found in models.values()))
        for variant in models["net"]["variants"]
    ]
    return tabulate(rows, ("", *models), "github", disable_numparse=True)


def links() -> str:
    """Stage 04: a step across each link, as a multiple of computing only; what a node sends."""
    results = load("04_links")
    rows = [
        (
            variant,
            "" if variant == "A/A" else f"{results['sent_bytes_a_step'][variant] / 1e6:.1f}",
            *(ratio(found["variants"][variant]) for found in results["rates"].values()),
        )
        for variant in results["rates"]["no limit"]["variants"]
    ]
    return tabulate(rows, ("", "MB sent", *results["rates"]), "github", disable_numparse=True)


def faults() -> str:
    """survive: what was injected, what went wrong, and how long it took to resume."""
    rows = [
        (
            row["what"],
            row["faults"],
            row["wrong_resumes"] + row["wrong_ends"],
            row["hangs"],
            row["orphans"],
            f"{row['end_seconds_median']:.1f}",
            f"{row['recovery_seconds_median']:.1f} ({row['recovery_seconds_p95']:.1f})",
            f"{row['lost_steps_median']:.0f} ({row['lost_steps_max']})",
        )
        for row in load("faults")["kinds"].values()
    ]
    heads = ("fault", "n", "wrong", "hangs", "orphans", "s to the end", "s to resume", "steps lost")
    return tabulate(rows, heads, "github", disable_numparse=True)


def cost_of_survive() -> str:
    """survive: its step, as a multiple of stage 05's."""
    variants = load("survive")["variants"]
    rows = [(name, f"{found['step_ms']:.1f}", ratio(found)) for name, found in variants.items()]
    return tabulate(rows, ("", "step, ms", "time / 05's"), "github", disable_numparse=True)


def precision() -> str:
    """Stage 05: images a second in each precision, as a multiple of fp32, and what it learns."""
    results = load("05_precision")
    places = {
        f"{name}, {place}": found["variants"]
        for name, both in results["models"].items()
        for place, found in both.items()
    }
    rows = []
    for variant, accuracy in results["accuracy"].items():
        cells = [faster(found[variant]) if variant in found else "" for found in places.values()]
        seeds = accuracy["test_accuracies"]
        learnt = f"{accuracy['median']:.1%} ({min(seeds):.1%} to {max(seeds):.1%})"
        rows.append((variant, *cells, learnt))
    again = [faster(found["A/A"]) for found in places.values()]
    rows.append(("A/A", *again, ""))
    return tabulate(rows, ("", *places, "test accuracy"), "github", disable_numparse=True)


def faster(row: dict[str, Any]) -> str:
    """Images a second, and how many times as fast as the baseline, with the interval."""
    return f"{row['images_per_second']:.1f}/s: {inverse(row)}"


def peaks() -> str:
    """Stage 05: the most that a step of one process holds at a time, in MiB."""
    results = load("05_precision")
    models = {n: both["one process"]["variants"] for n, both in results["models"].items()}
    rows = [
        (variant, *(f"{found[variant]['peak_bytes'] / 2**20:,.0f}" for found in models.values()))
        for variant in results["accuracy"]
    ]
    return tabulate(rows, ("", *models), "github", disable_numparse=True)


def switches() -> str:
    """Stage 05: each switch of DDP: time, what a rank holds, and whether it learns the same."""
    rows = []
    for name, row in load("05_switches")["variants"].items():
        held = {kind: f"{count / 2**20:.0f}" for kind, count in row["held_bytes"].items()}
        distance = f"{row['distance']:.0e}" if row["distance"] else "same bits"
        if name == "Adam":  # there is nothing to compare its weights with
            distance = ""
        kinds = held["gradients and buckets"], held["optimiser"], held["hook"]
        rows.append((name, ratio(row), *kinds, distance, f"{row['accuracy']:.1%}"))
    heads = ("gradients and buckets, MiB", "optimiser, MiB", "hook, MiB", "distance", "accuracy")
    return tabulate(rows, ("", "time", *heads), "github", disable_numparse=True)


def sync_batchnorm() -> str:
    """Stage 05: SyncBatchNorm by hand, as a multiple of BatchNorm of the same local batch."""
    results = load("05_sync_batchnorm")
    found = {**results["layers"], "a step of resnet18": results["steps"]}
    formats = list(results["steps"])
    rows = [
        (name, *(ratio(each[how]["variants"]["SyncBatchNorm"]) for how in formats))
        for name, each in found.items()
    ]
    return tabulate(rows, ("", *formats), "github", disable_numparse=True)


def stages() -> str:
    """Every stage and every reducer in one run."""
    rows = [
        (name, f"{row['samples_per_second']:,.0f}", inverse(row))
        for name, row in load(MACHINE)["stages"]["variants"].items()
    ]
    heads = ("", "samples/s", "times 01 with 1 thread")
    return tabulate(rows, heads, "github", disable_numparse=True)


def inverse(row: dict[str, Any]) -> str:
    """How many times as fast as the baseline, with the interval."""
    low, high = row["ratio_interval"]
    return f"{1 / row['ratio']:.2f} ({1 / high:.2f} to {1 / low:.2f})"


def ways_to_hold_less() -> str:
    """Stage 05: the peak of a rank in each way, measured and predicted."""
    ways = load(MACHINE)["process_memory"]["ways"]
    first = max(next(iter(ways.values()))["peak_bytes"])
    rows = []
    for name, way in ways.items():
        most, predicted = max(way["peak_bytes"]), way["predicted_bytes"]
        sizes = f"{most / 2**20:.0f}", f"{most / first - 1:+.0%}", f"{predicted / 2**20:.0f}"
        rows.append((name, *sizes))
    heads = ("", "peak, MiB", "", "predicted, MiB")
    return tabulate(rows, heads, "github", disable_numparse=True)


def scaling() -> str:
    """Stage 04: each prediction of a step beside its measurement."""
    return tabulate(predictions.cells(load("04_scaling")), predictions.HEADS, **GITHUB)


def race() -> str:
    """Whole trainings on MNIST: the stages, PyTorch's own recipe, and two libraries."""
    return tabulate(peers.rows(load("peers")), peers.HEADS, **GITHUB)


def peers_sample() -> str:
    """What one sample costs a process of one thread."""
    rows = [(what, f"{us:.0f}") for what, us in load("peers")["us_a_sample"].items()]
    return tabulate(rows, ("one thread", "µs a sample"), "github", disable_numparse=True)


TABLES: dict[str, Callable[[], str]] = {
    "origin of 05_sync_batchnorm": lambda: origin("05_sync_batchnorm"),
    "sync_batchnorm": sync_batchnorm,
    "origin of 02_data_parallel": lambda: origin("02_data_parallel"),
    "step_parts": step_parts,
    "interpreter_lock": interpreter_lock,
    "origin of 03_reducers": lambda: origin("03_reducers"),
    "reducers": reducers,
    "origin of 04_links": lambda: origin("04_links"),
    "links": links,
    "origin of faults": lambda: origin("faults"),
    "faults": faults,
    "origin of survive": lambda: origin("survive"),
    "survive": cost_of_survive,
    "origin of 05_precision": lambda: origin("05_precision"),
    "precision": precision,
    "peaks": peaks,
    "origin of stages": lambda: origin(MACHINE, "stages"),
    "stages": stages,
    "origin of process_memory": lambda: origin(MACHINE, "process_memory"),
    "ways to hold less": ways_to_hold_less,
    "origin of 04_scaling": lambda: origin("04_scaling"),
    "scaling": scaling,
    "origin of peers": lambda: origin("peers"),
    "peers": race,
    "peers_sample": peers_sample,
    "origin of 05_switches": lambda: origin("05_switches"),
    "switches": switches,
}


def main() -> None:
    for name, make in TABLES.items():
        print(f"\n{name}\n\n{make()}")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
