"""The sidebar: its groups, their pages and what they are called there, in this order.

The chapters of a page stand below it, in the order in which it links to them. A page that is
neither here nor a chapter is reached by links and by the search.
"""

import fnmatch
from collections.abc import Iterable
from pathlib import PurePath

# Previous and Next lead along the pages of "Course", and of "For a class".
GROUPS = {
    "Course": {
        "index": "Start",
        "01_single_gpu/index": "01 · Single GPU",
        "02_data_parallel/index": "02 · DataParallel",
        "03_ddp_manual_allreduce/index": "03 · All-reduce by hand",
        "04_ddp_torchrun/index": "04 · DDP and torchrun",
        "05_amp_syncbn/index": "05 · AMP and SyncBN",
        "beyond/puzzles/index": "Puzzles: write it, find it",
        "beyond/convert/index": "Convert your script",
        "packages/prove/index": "Prove that it is right",
    },
    "Roads": {
        "beyond/index": "Which road next?",
        "beyond/survive/index": "survive: a run for days",
        "beyond/shard/index": "shard: a model too large",
        "beyond/local_sgd/index": "local_sgd: a slow network",
        "beyond/forecast/index": "forecast: how many GPUs?",
    },
    "Tools": {
        "04_ddp_torchrun/launch/index": "launch: machines, SLURM",
        "packages/shm/index": "shm: a backend to read",
        "notebooks/01_throughput": "Notebook 01 · Throughput",
        "notebooks/02_memory": "Notebook 02 · Memory",
        "notebooks/03_same_result": "Notebook 03 · Same result",
        "notebooks/04_scaling": "Notebook 04 · Scaling",
        "notebooks/05_find_the_mistake": "Notebook 05 · Mistakes",
    },
    "For a class": {
        "docs/teaching": "A lab in four hours",
        "docs/two_gpus": "Two GPUs for an hour",
    },
    "Reference": {
        "docs/machines": "Any machine",
        "docs/troubleshooting": "Troubleshooting",
        "docs/glossary": "Glossary",
        "benchmarks/index": "Benchmarks",
    },
}
ROWS = [list(GROUPS["Course"]), list(GROUPS["For a class"])]
WAY = ROWS[0]
NAMES = {name: label for pages in GROUPS.values() for name, label in pages.items()}
# No chapters, although they lie below a page of the sidebar.
EVIDENCE = ("*/evidence/*", "*/results/*", "*/CHANGELOG", "beyond/puzzles/answers")


def pages_of(group: str, found: Iterable[str]) -> list[tuple[str, str]]:
    """The pages of a group with their names. Only a pattern may stand for none."""
    pages = list[tuple[str, str]]()
    for name, label in GROUPS[group].items():
        matches = sorted(fnmatch.filter(found, name)) if "*" in name else [name]
        pages += [(match, label) for match in matches]
    return pages


def parent(name: str) -> str | None:
    """The page of the sidebar below which a page stands, if it is a chapter."""
    if name in NAMES or any(fnmatch.fnmatch(name, pattern) for pattern in EVIDENCE):
        return None
    folders = [f"{folder}/index" for folder in PurePath(name).parents]
    return next((folder for folder in folders if folder in NAMES), None)


def is_shown(name: str) -> bool:
    return bool(parent(name)) or any(fnmatch.fnmatch(name, pattern) for pattern in NAMES)
