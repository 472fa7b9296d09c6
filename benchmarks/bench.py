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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.measure.memory import measure_process_memory
from benchmarks.measure.one_gpu import (
    measure_formats,
    measure_gloo,
    measure_nccl,
    measure_peaks,
    measure_replicas,
)
from benchmarks.measure.puzzles import measure_puzzles
from benchmarks.measure.reducers import measure_reducers
from benchmarks.measure.sharding import measure_sharding
from benchmarks.measure.shm_calls import measure_shm
from benchmarks.measure.stages import measure_stages, measure_survive
from benchmarks.measure.timing import Effort
from benchmarks.result_files import RESULTS, Results, machine_file, provenance, save, save_part
from benchmarks.tables import measurements
from benchmarks.tables.pages import origin_of
from common.options import Parser, UsageError, exit_on, int_at_least


class Section(NamedTuple):
    measure: Callable[[Effort], Results]
    file: str = ""  # under benchmarks/results/; without one, a part of the file of this machine
    tables: tuple[Callable[[Results], str], ...] = ()  # each makes one of the results
    on_gpu: bool = False  # otherwise it is measured on the CPU only


SHM_TABLES = (measurements.shm_sizes, measurements.shm_python_calls, measurements.shm_calls)
SECTIONS = {
    "stages": Section(measure_stages, tables=(measurements.stages,), on_gpu=True),
    "process_memory": Section(measure_process_memory, on_gpu=True),
    "formats": Section(measure_formats, tables=(measurements.formats,), on_gpu=True),
    "peaks": Section(measure_peaks, tables=(measurements.peaks,), on_gpu=True),
    "replicas": Section(measure_replicas, on_gpu=True),
    "gloo": Section(measure_gloo, on_gpu=True),
    "nccl": Section(measure_nccl, on_gpu=True),
    "reducers": Section(measure_reducers, file="reducers", tables=(measurements.ratios,)),
    "shm": Section(measure_shm, file="shm", tables=SHM_TABLES),
    "survive": Section(measure_survive, file="survive", tables=(measurements.survive,)),
    "shard": Section(measure_sharding, file="shard", tables=(measurements.shard,)),
    "puzzles": Section(measure_puzzles, file="puzzles"),
}


def measure(name: str, effort: Effort) -> Results:
    """The results of a section, with their provenance."""
    command = f"python benchmarks/bench.py {name}"
    origin = provenance(effort.device, command=command)  # before there is load
    return {"provenance": origin, **SECTIONS[name].measure(effort)}


def tables_of(name: str, results: Results) -> list[str]:
    """Its tables as the pages show them, and where they come from."""
    tables = [make(results) for make in SECTIONS[name].tables]
    return [*tables, origin_of(results)] if tables else []


def store(name: str, results: Results, args: argparse.Namespace) -> None:
    """As --help says: a complete run is stored, and any run where --out names a file."""
    file = SECTIONS[name].file
    if args.out:
        save(args.out, results)
    elif args.quick or args.rounds:
        print("not stored, because the run was cut short: --out FILE stores it all the same")
    elif file:
        save(RESULTS / f"{file}.json", results)
    else:
        save_part(machine_file(results["provenance"]), name, results)


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
    on_gpu = SECTIONS[args.section].on_gpu
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
