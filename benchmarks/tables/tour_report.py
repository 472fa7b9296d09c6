"""What the tour says: its tables and its report, made from tour.json."""

import math
from statistics import median
from typing import NamedTuple

from tabulate import tabulate

from benchmarks.measure.timing import AA
from benchmarks.result_files import MIB, Results
from benchmarks.tables.pages import table
from benchmarks.variants import VARIANTS, Layout, Variant
from shm.busy import (
    MIN_ROUNDS,
    Ratio,
    away_from_itself,
    busy_line,
    ratio_of,
    why_busy,
    why_loaded,
)

HOW_TO_READ = """\
In brackets: the 95 % interval of a ratio, widened by what "{again}" differs from
the first row; with a ?, 1 is inside. Each ratio is the median of the rounds, so it need not be the
quotient of two samples/s. If the brackets of two rows overlap, do not rank them."""
BEYOND_THE_CEILING = """\
A share above 100% cannot be: nobody is faster for talking. It is noise."""
NO_RATIOS = """\
No ratio is printed: what other programs take, they do not take from all rows alike."""
FEW_ROUNDS = """\
No ratio is printed: {rounds} rounds are too few for an interval. Take {epochs} epochs or more."""
EQUAL = 1e-5  # fp32 losses of the first epoch that differ less count as equal


@table("tour", "tour")
def learned(results: Results, style: str = "github") -> str:
    """What each stage has learned, and what each of its processes holds."""
    lines = []
    for row in results["rows"].values():
        summary = row["summary"]
        processes = summary["global_batch"] // summary["local_batch"]
        held = [sum(bytes_of.values()) / MIB for bytes_of in row["held"]]
        lines.append(
            {
                "stage": row["label"],
                "global batch": f"{processes} × {summary['local_batch']}",
                f"loss of epoch {results['epochs']}": f"{summary['train_loss']:.4f}",
                "test accuracy": f"{summary['test_accuracy']:.2%}",
                "MiB of tensors": " + ".join(f"{each:.1f}" for each in held),
            }
        )
    return aligned(lines, style)


def speeds(results: Results, style: str = "github") -> str:
    """How fast each program was in the rounds; first of all, whether that can be believed."""
    seconds, labels = results["step_seconds"], results["labels"]
    first, rounds = next(iter(results["rows"])), len(seconds[AA])
    reasons = why_busy(results["provenance"], seconds[first], seconds[AA])
    warning = [busy_line(reasons)] if reasons else []
    if why_loaded(results["provenance"]):
        ratios, shares, notes = {}, {}, [NO_RATIOS]
    elif rounds < MIN_ROUNDS:
        ratios, shares = {}, {}
        notes = [FEW_ROUNDS.format(rounds=rounds, epochs=1 + MIN_ROUNDS)]
    else:
        ratios, shares = ratios_of(seconds, first)
        notes = [HOW_TO_READ.format(again=again(labels[first]))]
    if any(share.high > 1 for share in shares.values()):
        notes.append(BEYOND_THE_CEILING)
    if results["ranks"] > results["provenance"]["cores"] and results["device"] == "cpu":
        notes.append(
            "The {ranks} ranks share {cores} cores, so they wait for each other.".format(
                ranks=results["ranks"], cores=results["provenance"]["cores"]
            )
        )
    lines = []
    for name, times in seconds.items():
        line = {"stage": again(labels[first]) if name == AA else labels[name]}
        line["samples/s"] = f"{results['global_batch'] / median(times):,.0f}"
        line["step ms"] = f"{1000 * median(times):.1f}"
        line["times the first"] = ratios[name].text() if name in ratios else ""
        line["share of the ceiling"] = shares[name].text(".0%") if name in shares else ""
        lines.append(line)
    return "\n\n".join([*warning, aligned(lines, style), *notes])


def again(label: str) -> str:
    """The name of the program that is the first one once more."""
    return f"{label} again"


def ratios_of(
    seconds: dict[str, list[float]], first: str
) -> tuple[dict[str, Ratio], dict[str, Ratio]]:
    """How many times as fast as the first each is; and which share of the ceiling it reaches.

    All cores have a share, too, because that is the fair rival of as many ranks.
    """
    away = away_from_itself(seconds[first], seconds[AA])
    ratios = {
        name: ratio_of(seconds[first], times).widened(1 if name == AA else away)
        for name, times in seconds.items()
        if name != first
    }
    shares = {
        name: ratio_of(seconds["ceiling"], times).widened(away)
        for name, times in seconds.items()
        if "ceiling" in seconds and name in VARIANTS and has_share(VARIANTS[name])
    }
    return ratios, shares


def has_share(variant: Variant) -> bool:
    return variant.layout is Layout.RANKS or variant.all_cores


def aligned(lines: list[dict[str, str]], style: str) -> str:
    right = ("left", *["right"] * (len(lines[0]) - 1))
    return tabulate(lines, "keys", style, colalign=right, disable_numparse=True)


class Repeats(NamedTuple):
    answer: str  # yes or no
    largest: str  # difference of a loss in the first epoch
    reason: str


def compare(key: str, results: Results) -> Repeats:
    """Does this stage repeat the losses of 01, how closely, and why not."""
    variant, several = VARIANTS[key], results["ranks"] > 1
    epoch = slice(results["epoch_steps"])
    pairs = zip(*(results["rows"][each]["losses"][epoch] for each in ("01", key)), strict=True)
    distances = [abs(a - b) for a, b in pairs]
    if not all(map(math.isfinite, distances)):
        return Repeats("no", "", "A loss is not finite.")
    largest = max(distances)
    if largest <= EQUAL:
        return Repeats("yes", f"{largest:.0e}", "")
    causes = []
    if variant.stage in ("02", "03", "04") and several and results["model"] != "net":
        causes.append("BatchNorm takes its statistics from the local batch.")
    if several and results["model"] == "net":
        causes.append("The parts of a batch get other dropout masks than the whole batch.")
    if variant.bf16:
        causes.append("A number in bf16 has 8 significant bits, in fp32 it has 24.")
    if results["device"] == "cuda":
        causes.append("By default, a GPU computes convolutions in TF32, with 11 bits.")
    causes = causes or ["Sums in another order are rounded otherwise, and steps amplify it."]
    return Repeats("no", f"{largest:.2g}", " ".join(causes))


@table("repeats", "tour")
def repeats(results: Results) -> str:
    """A table of the stages beside 01; nothing if 01 has not run."""
    first, *others = results["rows"]
    if first != "01":
        return ""
    rows = [(results["rows"][key]["label"], *compare(key, results)) for key in others]
    heads = ("stage", "repeats 01?", "largest difference", "why not")
    return tabulate(rows, heads, "github", disable_numparse=True)


REPORT = """\
# The tour: {model} on {dataset}, {ranks} ranks

Measured on {date} in {seconds:.0f} s: {hardware}, {device}, torch {torch}, Python {python}. \
{epochs} epochs, global batch {global_batch}. \
Each process has one thread, except in the row with all cores.

{learned}

Global batch: the number of processes or copies of the model × the local batch. MiB of tensors: \
what each process or copy holds at the end of forward, without PyTorch itself.

{repeats}

A stage repeats 01 if no loss of the first epoch differs by more than 1e-5.

## How fast each stage was

{speeds}

samples/s: from the median step, of all processes together, in {rounds} rounds, in each of which \
every program trained for a turn while the others stood still. The ceiling is stage 01 in as many \
processes as there are ranks, each with its local batch, which never talk.
"""


def report(results: Results, seconds: float) -> str:
    tables = {"learned": learned(results), "speeds": speeds(results), "repeats": repeats(results)}
    rounds = len(results["step_seconds"][AA])
    about = {**results["provenance"], **results, **tables, "rounds": rounds}
    return REPORT.format(seconds=seconds, **about)
