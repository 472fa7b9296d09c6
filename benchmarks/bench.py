"""Measure what a page or a notebook shows: one section for each question.

    python benchmarks/bench.py reducers             # prints its table, and writes reducers.json
    python benchmarks/bench.py stages               # of `make bench`: writes machines/HARDWARE.json
    python benchmarks/bench.py stages --rounds 3    # only prints its table

A complete run writes its file in benchmarks/results/; with --quick or --rounds nothing is written,
unless --out names a file. Each rank has one thread. Do not use the machine for anything else
meanwhile. bench.md tells what each section measures.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.sections import find_sections
from benchmarks.measure.timing import AA, Effort
from benchmarks.result_files import RESULTS, Results, machine_file, provenance, save, save_part
from benchmarks.tables.pages import find_tables, origin_of
from common.options import Parser, UsageError, exit_on, int_at_least
from shm.busy import LoadWatch, busy_line, why_loaded, why_unsteady

SECTIONS = find_sections()


def measure(name: str, effort: Effort) -> Results:
    """Measure a section; return its results with their provenance."""
    watch = LoadWatch()
    origin = provenance(effort.device, command=f"python benchmarks/bench.py {name}")
    results = SECTIONS[name].measure(effort)
    return {"provenance": origin | watch.load(), **results}


def why_busy(results: Results) -> list[str]:
    """Say why the results cannot be believed: by the load, and by each A/A pair in them."""
    reasons = why_loaded(results["provenance"]) + results.get("busy", [])
    for rows in comparisons(results):
        first = next(iter(rows.values()))
        low, high = first["step_ms_quartiles"]
        reasons += why_unsteady(rows[AA]["ratio"], (low, first["step_ms"], high))
    return reasons


def comparisons(results: Any) -> Iterator[dict[str, Results]]:
    """Find all rows of variants that have an A/A pair, as timing.summarize makes them."""
    if isinstance(results, dict):
        if AA in results and "ratio" in results[AA]:
            yield results
        for each in results.values():
            yield from comparisons(each)


def tables_of(name: str, results: Results) -> list[str]:
    """Make the tables of a section as the pages show them, and say where they come from."""
    tables = [each.make(results) for each in find_tables().values() if each.section == name]
    return [*tables, origin_of(results)] if tables else []


def store(name: str, results: Results, args: argparse.Namespace) -> None:
    """Store a complete run, and any run where --out names a file, as --help says."""
    if args.out:
        save(args.out, results)
    elif args.quick or args.rounds:
        print("not stored, because the run was cut short: --out FILE stores it all the same")
    elif reasons := why_busy(results):
        print(f"{busy_line(reasons)}\nnot stored: --out FILE stores it all the same")
    elif SECTIONS[name].seconds_on_gpu:
        save_part(machine_file(results["provenance"]), name, results)
    else:
        save(RESULTS / f"{name}.json", results)


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("section", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    add("--quick", action="store_true", help="as little as shows that it runs")
    add("--rounds", type=int_at_least(1), metavar="N", help="at most so many of each comparison")
    add("--out", type=Path, metavar="FILE", help="write the results there, and only there")
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    add("--device", choices=devices, help="default: cuda where a GPU is of use")
    args = parser.parse_args()
    on_gpu = SECTIONS[args.section].seconds_on_gpu > 0
    if args.device == "cuda" and not on_gpu:
        raise UsageError(f"{args.section} is measured on the CPU: try --device cpu")
    args.device = args.device or (devices[0] if on_gpu else "cpu")
    return args


def main() -> None:
    args = parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # read when torch is imported
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    rounds = 1 if args.quick else args.rounds or Effort.rounds
    results = measure(args.section, Effort(rounds, args.quick, args.device))
    print("\n\n".join(tables_of(args.section, results)))
    for variant, reason in results.get("skipped", {}).items():
        print(f"left out: {variant}: {reason}")
    store(args.section, results, args)


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
