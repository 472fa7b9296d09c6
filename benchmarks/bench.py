"""Measure this machine: what the notebooks show, or one section whole.

    python benchmarks/bench.py             # as `make bench`: results/HARDWARE.json
    python benchmarks/bench.py reducers    # its tables, and results/03_reducers.json

Sections run one after the other, each in a process of its own with one thread per rank. Each
result is stored at once. Do not use the machine for anything else meanwhile. measure_stages.md
tells what each section measures.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import tables
from common.options import Parser, UsageError, exit_on
from measure_local_sgd import measure_local_sgd
from measure_local_sgd_links import measure_local_sgd_links
from measure_memory import measure_process_memory
from measure_precision import measure_precision
from measure_reducers import measure_reducers
from measure_scaling import measure_scaling
from measure_stages import measure_stages, measure_survive
from measure_threads import measure_threads
from stage_runs import ROOT
from timing import RESULTS, Effort, Results, provenance, save


@dataclass(frozen=True)
class Section:
    measure: Callable[[Effort], Results]
    tables: tuple[Callable[[Results], str], ...]  # of its results
    file: str = ""  # under benchmarks/results/; without one, nothing is kept
    on_gpu: bool = False  # otherwise it is measured on the CPU only


SECTIONS = {
    "stages": Section(measure_stages, (tables.stages,), on_gpu=True),
    "process_memory": Section(measure_process_memory, (tables.ways_to_hold_less,), on_gpu=True),
    "scaling": Section(measure_scaling, (tables.scaling,), "04_scaling"),
    "threads": Section(measure_threads, (tables.threads,), "02_threads"),
    "reducers": Section(measure_reducers, (tables.reducers,), "03_reducers"),
    "precision": Section(
        measure_precision, (tables.precision, tables.peaks), "05_precision", on_gpu=True
    ),
    "survive": Section(measure_survive, (tables.survive,), "survive"),
    "local_sgd": Section(measure_local_sgd, (tables.local_sgd,), "local_sgd"),
    "local_sgd_links": Section(
        measure_local_sgd_links, (tables.local_sgd_links,), "local_sgd_links"
    ),
}
OF_NOTEBOOKS = ("stages", "process_memory", "scaling")  # of `make bench`


def measure(name: str, effort: Effort) -> Results:
    """The results of a section, with their provenance."""
    command = f"python benchmarks/bench.py {name}"
    where = provenance(effort.device, command=command)  # before there is load
    results = SECTIONS[name].measure(effort)
    return {"provenance": where | results.pop("provenance", {}), **results}


def run_section(name: str, args: argparse.Namespace) -> None:
    section = SECTIONS[name]
    if args.models and name != "precision":
        raise UsageError("--models is for precision only")
    if args.device == "cuda" and not section.on_gpu:
        raise UsageError(f"{name} is measured on the CPU: try --device cpu")
    device = args.device or ("cuda" if section.on_gpu and torch.cuda.is_available() else "cpu")
    rounds = 1 if args.quick else 3 if args.brief else 1000
    effort = Effort(rounds, args.quick, args.brief, device, models=tuple(args.models))
    results = measure(name, effort)
    print("\n\n".join(table(results) for table in section.tables))
    for variant, reason in results.get("skipped", {}).items():
        print(f"left out: {variant}: {reason}")
    if args.out:
        save(args.out, results)
    elif section.file and device == "cpu" and not args.quick and not args.brief:
        save(RESULTS / f"{section.file}.json", results)


def run_all() -> None:
    """Measure what the notebooks show briefly, each section in a process of its own."""
    where = provenance("cuda" if torch.cuda.is_available() else "cpu")
    path = RESULTS / f"{re.sub('[^a-z0-9]+', '-', where['hardware'].lower()).strip('-')}.json"
    env, failed = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    for name in OF_NOTEBOOKS:
        print(f"\n== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "results.json")
            command = [sys.executable, __file__, name, "--brief", f"--out={out}"]
            if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
                failed.append(name)
                continue
            results = json.loads(path.read_text()) if path.exists() else {}
            save(path, results | {"provenance": where, name: json.loads(out.read_text())})
    print(f"wrote {path.relative_to(ROOT)}; failed: {', '.join(failed) or 'none'}")
    if failed:
        sys.exit(1)


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("section", nargs="?", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="to see that it runs; stores nothing")
    effort.add_argument("--brief", action="store_true", help="few rounds; stores nothing")
    add("--out", type=Path, metavar="FILE", help="write the results there")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is of use")
    add("--models", nargs="+", default=(), metavar="NAME", help="for precision: torchvision's")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none here: try --device cpu")
    if not args.section:
        if len(sys.argv) > 1:
            raise UsageError("these options are for one section: try bench.py reducers --quick")
        run_all()
    elif os.environ.get("OMP_NUM_THREADS") != "1":  # read when torch is imported
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    else:
        run_section(args.section, args)


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
