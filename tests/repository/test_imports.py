"""Rooms import from rooms as CONTRIBUTING.md says; no program is mistaken for another one."""

import ast
import json
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from local_ranks.chapters import PROGRAMS, ROOT

PACKAGES = ("packages/prove/src/prove", "packages/shm/src/shm")
FOLDERS = (*PACKAGES, "common", "local_ranks", "benchmarks", "docs")

ROOMS = {  # the rooms that each imports from, as CONTRIBUTING.md says; tests import from all
    "course": set(),
    "packages": set(),
    "beyond": {"course", "packages"},
    "workshop": {"course", "packages", "beyond"},
    "notebooks": {"course", "packages", "beyond", "workshop"},
}
ROOM_OF_FOLDER = {
    "common": "course",
    "local_ranks": "course",
    "benchmarks": "workshop",
    "docs": "workshop",
}


def room_of(path: Path) -> str:
    first, *parts = path.relative_to(ROOT).parts
    if "tests" in (first, *parts):  # also the tests of the packages
        return "tests"
    return "course" if first.startswith("0") else ROOM_OF_FOLDER.get(first, first)


def what_is_imported(path: Path) -> Path:
    """The program itself, or its package: by this name, an import begins."""
    while (path.parent / "__init__.py").exists():
        path = path.parent
    return path


def source_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(text for text in texts if not text.startswith("%%"))  # those are no Python


def rooms_imported(path: Path, source: str, rooms_of: dict[str, set[str]]) -> set[str]:
    """Find the other rooms from which this program imports."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        for name in (name.partition(".")[0] for name in names):
            if not (path.parent / f"{name}.py").exists():  # that one is taken first
                rooms |= rooms_of.get(name, set())
    return rooms - {room_of(path)}


def test_a_room_imports_only_from_the_rooms_that_contributing_names():
    folders = ("0?_*", "packages", "beyond", "notebooks", "tests", *ROOM_OF_FOLDER)
    paths = [path for each in folders for path in ROOT.glob(f"{each}/**/*.py")]
    rooms_of: dict[str, set[str]] = {}
    for path in paths:
        rooms_of.setdefault(what_is_imported(path).stem, set()).add(room_of(path))
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in (*paths, *ROOT.glob("notebooks/*.ipynb")):
        if (room := room_of(path)) in ROOMS:
            found[room] |= rooms_imported(path, source_of(path), rooms_of)
    assert found == ROOMS
    changed = "import prove.watch.pretend_gpus\nimport benchmarks.measure.timing"  # the control
    assert rooms_imported(ROOT / "common/data.py", changed, rooms_of) == {"packages", "workshop"}


NEVER_IMPORTED = ("train", "minimal")  # each of several folders has its own
ON_THE_PATH = ("notebooks", "docs/tools", "tests/*")  # besides packages and chapters


def names_of_several(paths: Collection[Path]) -> list[str]:
    """Find names by which an import would find two of these, or one and a module of Python's."""
    names = Counter(path.stem for path in {what_is_imported(path) for path in paths})
    return sorted(n for n in names if names[n] > 1 or n in sys.stdlib_module_names)


def test_no_program_is_imported_in_place_of_another_one():
    files = [path for each in (*FOLDERS, *ON_THE_PATH) for path in ROOT.glob(f"{each}/*.py")]
    paths = [*files, *(path for path in PROGRAMS if path.stem not in NEVER_IMPORTED)]
    assert names_of_several(paths) == []
    changed = [*paths, *(ROOT / "beyond" / name for name in ("calendar.py", "ring.py", "shm.py"))]
    assert names_of_several(changed) == ["calendar", "ring", "shm"], "the control"
