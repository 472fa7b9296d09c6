"""Measure this machine: every section briefly, or one section whole.

    python benchmarks/bench.py             # as `make bench`, 10 minutes: results/HARDWARE.json
    python benchmarks/bench.py reducers    # its table; results/03_reducers.json and .png
    python benchmarks/bench.py pictures    # draw every picture again, from results/*.json alone

Sections run one after the other, each in a process of its own with one thread per rank. Each
result is stored at once. Do not use the machine for anything else meanwhile. The sections:
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from tabulate import tabulate

from common.options import Parser, UsageError, exit_on, int_at_least
from links import as_node
from plots import Draw, draw_picture
from run_stage import ROOT
from tables import shown
from timing import RESULTS, Effort, Results, load, provenance, save


@dataclass(frozen=True)
class Section:
    """`measure_SECTION` of a module, and `draw_SECTION` if it has a picture."""

    module: str
    result: str  # its file under benchmarks/results/; without one, nothing is kept
    text: str
    bench: bool = False  # part of `make bench`; the others are for the CPU only


SECTIONS = {
    "stages": Section("stages", "", "samples per second of each stage", True),
    "process_memory": Section("process_memory", "", "the memory of a process, by kind", True),
    "scaling": Section("scaling", "04_scaling", "steps of DDP, predicted and measured", True),
    "reducers": Section("costs", "03_reducers", "a step with each reducer of stage 03", True),
    "precision": Section("precision", "05_precision", "training in each precision", True),
    "threads": Section("costs", "02_threads", "two halves of a batch: threads, processes"),
    "local_sgd": Section("local_steps", "04_local_sgd", "what local SGD learns, beside DDP"),
    "local_sgd_links": Section("local_steps", "04_local_sgd_links", "its steps on slow links"),
    "survive": Section("stages", "survive", "what a step of survive costs over stage 05's"),
}
BENCH = [name for name, section in SECTIONS.items() if section.bench]
OPTIONS = {"ranks": ("stages", "precision"), "models": ("precision",), "data_dir": ("local_sgd",)}


def measure(name: str, effort: Effort) -> Results:
    """What a section finds, with its provenance."""
    command = f"python benchmarks/bench.py {name}"
    where = provenance(effort.device, command=command)  # before there is load
    found = getattr(import_module(SECTIONS[name].module), f"measure_{name}")(effort)
    return {"provenance": where | found.pop("provenance", {}), **found}


def committed() -> dict[str, Results]:
    """The results of `make bench` on every machine, by its hardware: files with a dash in the name.

    ONLY_RESULTS, names with commas between, hides others, of a reader, from the suite's notebooks.
    """
    only = os.environ.get("ONLY_RESULTS", "").split(",")
    paths = [p for p in sorted(RESULTS.glob("*-*.json")) if p.name in only or only == [""]]
    found = [load(path.stem) for path in paths]
    return {content["provenance"]["hardware"]: content for content in found}


def pictures() -> dict[str, Draw]:
    """What draws each picture, by the name of its results."""
    found = {"tour": import_module("tour").draw}
    for name, section in SECTIONS.items():
        draw = getattr(import_module(section.module), f"draw_{name}", None)
        for result in (section.result, f"{section.result}_cuda"):
            if draw and (RESULTS / f"{result}.json").exists():
                found[result] = draw
    return found


def draw(*names: str) -> None:
    for name, how in pictures().items():
        if name in (names or [name]):
            draw_picture(name, how)
            print(f"wrote benchmarks/results/{name}.png")


def run_section(name: str, args: argparse.Namespace) -> None:
    section = SECTIONS[name]
    for option, takers in OPTIONS.items():
        if getattr(args, option) and name not in takers:
            raise UsageError(f"--{option.replace('_', '-')} is for {' and '.join(takers)} only")
    if args.device == "cuda" and not section.bench:
        raise UsageError(f"{name} is measured on the CPU: try --device cpu")
    device = args.device or ("cuda" if torch.cuda.is_available() and section.bench else "cpu")
    rounds = 1 if args.quick else 3 if args.brief else 1000
    more = {option: getattr(args, option) for option in OPTIONS if getattr(args, option)}
    effort = Effort(rounds, args.quick, args.brief, device, **more)
    if args.node:
        return as_node(getattr(import_module(section.module), f"{name}_on_node"), args.node)
    results = measure(name, effort)
    print("\n\n".join(shown(name, results)))
    for what, why in (results.get("skipped") or results.get("left_out") or {}).items():
        print(f"left out: {what}: {why}")
    if args.out:
        save(args.out, results)
    elif section.result and not args.quick and not args.brief:
        result = section.result + ("_cuda" if device == "cuda" else "")
        save(RESULTS / f"{result}.json", results)
        draw(result)


def run_all(sections: list[str], device: str) -> None:
    """Measure these sections briefly, each in a process of its own."""
    where = provenance(device)
    path = RESULTS / f"{re.sub('[^a-z0-9]+', '-', where['hardware'].lower()).strip('-')}.json"
    env, took, failed = {**os.environ, "OMP_NUM_THREADS": "1"}, [], []
    for section in sections:
        print(f"\n== {section}", flush=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            flags = ["--brief", "--out", str(out), "--device", device]
            program = [sys.executable, __file__, section, *flags]
            if subprocess.run(program, cwd=ROOT, env=env).returncode == 0:
                results = json.loads(path.read_text()) if path.exists() else {}  # as it is by now
                found = {section: json.loads(out.read_text())}
                save(path, {**results, "provenance": where, **found})  # the next one may fail
            else:
                failed.append(section)
        took.append((section, time.perf_counter() - start))
    print("\n" + tabulate([*took, ("total", sum(s for _, s in took))], floatfmt=".0f"))
    print(f"wrote {path.relative_to(ROOT)}; failed: {', '.join(failed) or 'none'}")
    if failed:
        sys.exit(1)


def main() -> None:
    sections = "".join(f"\n    {name:18} {each.text}" for name, each in SECTIONS.items())
    parser = Parser(f"{__doc__}{sections}")
    add = parser.add_argument
    add("section", nargs="?", choices=(*SECTIONS, "pictures"), metavar="SECTION", help="see above")
    text = "without SECTION: only these, separated by commas; the file keeps the others"
    add("--only", default=",".join(BENCH), metavar="NAMES", help=text)
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="to see that it runs; stores nothing")
    effort.add_argument("--brief", action="store_true", help="few rounds; stores nothing")
    add("--out", type=Path, metavar="FILE", help="write the result there, and draw nothing")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is of use")
    add("--ranks", type=int_at_least(1), metavar="N", help="for stages and precision")
    add("--models", nargs="+", metavar="NAME", help="for precision: names of torchvision")
    add("--data-dir", metavar="DIR", help="for local_sgd: the folder of MNIST")
    add("--node", type=Path, help=argparse.SUPPRESS)  # what two_nodes_here.sh runs in each node
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none here: try --device cpu")
    if args.section == "pictures":
        draw()
    elif args.section and os.environ.get("OMP_NUM_THREADS") != "1":  # read when torch is imported
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    elif args.section:
        run_section(args.section, args)
    elif args.quick or args.brief or args.out or any(getattr(args, each) for each in OPTIONS):
        raise UsageError("these options are for one section: try bench.py reducers --quick")
    elif not set(chosen := args.only.split(",")) <= set(BENCH):
        raise UsageError(f"--only {args.only}: expected one or more of {','.join(BENCH)}")
    else:
        run_all(chosen, args.device or ("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
