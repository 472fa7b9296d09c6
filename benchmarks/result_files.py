"""Files of results: what each holds, where they lie, and the machine that they come from."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from local_ranks.chapters import ROOT

RESULTS = ROOT / "benchmarks" / "results"
MACHINE = "machines/amd-epyc-2-cores"  # the pages show its `make bench`
GPU = "gpu/1-x-nvidia-h200/gpu"  # the pages show its `make gpu`
MIB = 2**20

Results = dict[str, Any]


def hardware(device: str) -> str:
    """The name of the CPU, or of the GPUs."""
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has this file
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def git(*words: str) -> str:
    """Return what a git command prints, or nothing where there is no git or no repository."""
    with suppress(FileNotFoundError):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()
    return ""


def commit() -> str:
    """Name the commit of our files, with -dirty if programs have changed since, results aside.

    The variable COMMIT names it where the files are a copy without a repository, or with another.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    programs = (".", ":!benchmarks/results")
    changes = git("status", "--porcelain", "--", *programs)
    return (git("describe", "--always") or "unknown") + "-dirty" * bool(changes)


def provenance(device: str = "cpu", **settings: Any) -> Results:
    """Say where, when and how something is measured, as every file of results holds it."""
    return {
        "hardware": hardware(device),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "python": platform.python_version(),
        "commit": commit(),
        "date": date.today().isoformat(),
        **settings,
    }


def file_name(hardware: str) -> str:
    return re.sub("[^a-z0-9]+", "-", hardware.lower()).strip("-")


def machine_file(origin: Results) -> Path:
    """Name the file where `make bench` stores what it measured on a machine of this provenance."""
    return RESULTS / "machines" / f"{file_name(origin['hardware'])}.json"


def origin_line(origin: Results) -> str:
    """Turn a provenance into the caption of a picture."""
    version = origin["torch"].partition("+")[0]
    return f"{origin['hardware']}, torch {version}, {origin['date']}."


def json_text(value: Any, indent: str = "") -> str:
    """Format JSON with one line for each object that holds no other one, so a diff can be read."""
    text = json.dumps(value)
    if text.count("{") < 2 or isinstance(value, str):
        return text
    deeper = f"{indent}  "
    if isinstance(value, dict):
        start, end = "{}"
        lines = [f"{json.dumps(key)}: {json_text(each, deeper)}" for key, each in value.items()]
    else:
        start, end = "[]"
        lines = [json_text(each, deeper) for each in value]
    return f"{start}\n{deeper}" + f",\n{deeper}".join(lines) + f"\n{indent}{end}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(content) + "\n")


def save(path: Path, results: Results) -> None:
    """Store results, and say so if their commit does not hold the program that measured them."""
    write_json(path, results)
    print(f"wrote {path}")
    if results["provenance"]["commit"].endswith("-dirty"):
        print("note: programs had changes that their commit does not hold: commit, measure again")


def save_part(path: Path, part: str, results: Results) -> None:
    """Store a part of a file; its other parts stay as they were measured."""
    others = json.loads(path.read_text()) if path.exists() else {}
    save(path, others | {"provenance": results["provenance"], part: results})


def load(name: str) -> Results:
    return json.loads((RESULTS / f"{name}.json").read_text())
