"""Measure everything on this machine in ten minutes: one file, results/HARDWARE.json.

    python benchmarks/bench.py

Each section is a benchmark of this folder with --brief: fewer rounds, smaller models, the same
code. They run one after the other, and each is stored as soon as it is there. The notebooks show
this file beside those of other machines. Leave the machine alone meanwhile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from common.options import Parser, UsageError, usage_errors_exit
from common.record import hardware

from timing import RESULTS, ROOT, provenance, require_device, save

SECTIONS = (  # each is the name of its program too
    "stages",
    "timeline",
    "process_memory",
    "scaling",
    "data_parallel",
    "reducers",
    "precision",
    "switches",
    "sync_batchnorm",
)


def file_of(machine: str) -> Path:
    """Where the results of that hardware stand: its name in small letters, digits and dashes."""
    return RESULTS / f"{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"


def committed() -> dict[str, dict[str, Any]]:
    """The results of `make bench` on every machine, by its hardware.

    Their names have a dash, those of the long measurements have none: these are not even opened.
    ONLY_RESULTS, names of such files with commas between, hides the others: of a reader, say, when
    the suite compares a notebook with what was committed.
    """
    only = os.environ.get("ONLY_RESULTS", "").split(",")
    found = {}
    for path in sorted(RESULTS.glob("*-*.json")):
        if path.name in only or only == [""]:
            content = json.loads(path.read_text())
            found[content["provenance"]["hardware"]] = content
    return found


def measure(section: str, device: str) -> dict[str, Any]:
    """Run the section's program; what it wrote. RuntimeError if it fails; it has told why."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        program = [sys.executable, str(ROOT / "benchmarks" / f"{section}.py")]
        program += ["--brief", "--out", str(out), "--device", device]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if subprocess.run(program, cwd=ROOT, env=env).returncode != 0:
            raise RuntimeError(f"{section} failed")
        return json.loads(out.read_text())


def main() -> None:
    parser = Parser(__doc__)
    text = "these sections, with commas between; the file keeps the others"
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="NAMES", help=text)
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    text = "where the sections compute; cuda if torch sees a GPU, else cpu"
    parser.add_argument("--device", default=gpu, choices=("cpu", "cuda"), help=text)
    args = parser.parse_args()
    chosen = args.only.split(",")
    if not set(chosen) <= set(SECTIONS):
        raise UsageError(f"--only {args.only}: expected one or more of {','.join(SECTIONS)}")
    require_device(args.device)
    path = file_of(hardware(torch.device(args.device)))
    where, took, failed = provenance(args.device), [], []
    for section in chosen:
        print(f"\n== {section}", flush=True)
        start = time.perf_counter()
        try:
            found = measure(section, args.device)
            results = json.loads(path.read_text()) if path.exists() else {}  # as it is by now
            save(path, {**results, "provenance": where, section: found})  # the next one may fail
        except RuntimeError:
            failed.append(section)
        took.append((section, time.perf_counter() - start))
    print("\n" + tabulate([*took, ("together", sum(s for _, s in took))], floatfmt=".0f"))
    print(f"wrote {path.relative_to(ROOT)}; failed: {', '.join(failed) or 'none'}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
