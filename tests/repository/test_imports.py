"""Rooms import from rooms as CONTRIBUTING.md says, no import leads back to its own module, and a
program is never mistaken for another one."""

import ast
import json
import sys
from collections import Counter
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from local_ranks.chapters import PROGRAMS, ROOT

PACKAGES = ("packages/prove/src/prove", "packages/shm/src/shm")
FOLDERS = (*PACKAGES, "common", "local_ranks", "benchmarks", "docs")

ROOMS = {  # the rooms that each imports from, as CONTRIBUTING.md says; tests import from all
    "course": set(),
    "packages": set(),
    "beyond": {"course", "packages"},
    "workshop": {"course", "packages", "beyond"},
    "notebooks": {"course", "beyond", "workshop"},
}
ROOM_OF_FOLDER = {
    "common": "course",
    "local_ranks": "course",
    "benchmarks": "workshop",
    "docs": "workshop",
}

Graph = dict[str, set[str]]  # the modules that each module imports


def sources_of(folder: str) -> dict[str, str]:
    """Read a folder's sources, by the names that their imports use: shm, shm.work."""
    sources = {}
    for file in (ROOT / folder).rglob("*.py"):
        name = ".".join(file.relative_to((ROOT / folder).parent).with_suffix("").parts)
        sources[name.removesuffix(".__init__")] = file.read_text()
    return sources


def imported(source: str, modules: Collection[str]) -> set[str]:
    """Which of these modules all its import statements name, also those within functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:  # from a package, a module or what its __init__ has
                name = f"{node.module}.{alias.name}"
                names.add(name if name in modules else str(node.module))
    return names.intersection(modules)


def graph_of(sources: dict[str, str]) -> Graph:
    return {name: imported(source, sources) - {name} for name, source in sources.items()}


def circle_in(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_leads_back_to_its_own_module(folder):
    sources = sources_of(folder)
    graph = graph_of(sources)
    assert any(graph.values())
    assert circle_in(graph) == []
    importing = next(name for name in graph if graph[name])
    needed = min(graph[importing])
    back = {needed: f"{sources[needed]}\n\ndef late():\n    import {importing}\n"}
    assert {importing, needed} <= {*circle_in(graph_of(sources | back))}, "the control"


def reached_from(start: set[str], graph: Graph) -> set[str]:
    """Return these modules, with all that they import and what is imported from there on."""
    reached: set[str] = set()
    while start:
        reached |= start
        start = set().union(*(graph[each] for each in start)) - reached
    return reached


def test_common_holds_what_the_stages_import_and_nothing_else():
    sources = sources_of("common")
    stages = [path.read_text() for path in ROOT.glob("0?_*/train.py")]
    needed = set().union(*(imported(stage, sources) for stage in stages))
    graph = graph_of(sources)
    assert graph.keys() - reached_from(needed, graph) == {"common"}
    more = graph_of(sources | {"common.extra": "import common.data"})  # the control
    assert more.keys() - reached_from(needed, more) == {"common", "common.extra"}


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


def chapters_out_of_reach(path: Path, source: str) -> set[str]:
    """The chapters of other folders that a program imports, which has not put them on the path."""
    others = {chapter.stem for chapter in PROGRAMS if chapter.parent != path.parent}
    beside = {program.stem for program in path.parent.glob("*.py")}
    has_path = "local_ranks.chapters" in imported(source, ["local_ranks.chapters"])
    return set() if has_path else imported(source, others - beside)


def test_a_program_reaches_each_chapter_that_it_imports():
    """Programs may be started by themselves; in a test, all chapters are on the path already."""
    tools = [path for each in ("docs/tools", "tests/*") for path in ROOT.glob(f"{each}/*.py")]
    programs = [*PROGRAMS, *(path for path in tools if "\nif __name__ ==" in path.read_text())]
    assert [path for path in programs if chapters_out_of_reach(path, path.read_text())] == []
    zero = ROOT / "beyond/shard/zero.py"
    changed = zero.read_text().replace("import local_ranks.chapters", "")  # the control
    assert chapters_out_of_reach(zero, changed) == {"reducers"}
