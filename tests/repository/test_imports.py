"""Rooms import from rooms as CONTRIBUTING.md says, no import leads back to its own module, and a
program is never mistaken for another one."""

import ast
import json
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from common.chapters import ROOT, load_program

FOLDERS = ("packages/prove/src/prove", "packages/shm/src/shm", "common", "benchmarks", "docs")

ROOMS = {  # from which others each imports, as CONTRIBUTING.md says; tests import from all
    "course": set(),
    "packages": set(),
    "beyond": {"course", "packages"},
    "workshop": {"course", "packages", "beyond"},
    "notebooks": {"course", "beyond", "workshop", "tests"},
}
ROOM_OF_FOLDER = {"common": "course", "benchmarks": "workshop", "docs": "workshop"}

Graph = dict[str, set[str]]  # of each module, those that it imports


def sources_of(folder: str) -> dict[str, str]:
    """By the names that their imports use: shm, shm.work."""
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
            for alias in node.names:  # of a package, a module or what its __init__ has
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


def top_module(path: Path) -> str:
    """By which name its import begins: its own, or that of its package."""
    while (path.parent / "__init__.py").exists():
        path = path.parent
    return path.stem


def source_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(text for text in texts if not text.startswith("%%"))  # those are no Python


def rooms_imported(path: Path, source: str, rooms_of: dict[str, set[str]]) -> set[str]:
    """From which other rooms this program imports, or loads chapters."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "load_program":
            rooms |= {room_of(ROOT / ast.literal_eval(node.args[0]))}
        for name in (name.partition(".")[0] for name in names):
            if not (path.parent / f"{name}.py").exists():  # that one is taken first
                rooms |= rooms_of.get(name, set())
    return rooms - {room_of(path)}


def test_a_room_imports_only_from_the_rooms_that_contributing_names():
    folders = ("0?_*", "packages", "beyond", "notebooks", "tests", *ROOM_OF_FOLDER)
    paths = [path for each in folders for path in ROOT.glob(f"{each}/**/*.py")]
    rooms_of: dict[str, set[str]] = {}
    for path in paths:
        rooms_of.setdefault(top_module(path), set()).add(room_of(path))
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


def between_sides(graph: Graph) -> list[tuple[str, str]]:
    """Imports that lead from one side of prove to the other."""

    def side(name: str) -> str:
        return name.removeprefix("prove.").partition(".")[0]

    pairs = [(name, needed) for name in graph for needed in graph[name]]
    return [pair for pair in pairs if {*map(side, pair)} == {"watch", "judge"}]


def test_what_watches_a_script_and_what_judges_it_share_the_records_alone():
    sources = sources_of("packages/prove/src/prove")
    assert between_sides(graph_of(sources)) == []
    observe = sources["prove.watch.observe"]
    changed = {"prove.watch.observe": f"{observe}\nfrom prove.judge import table\n"}
    assert between_sides(graph_of(sources | changed)) == [
        ("prove.watch.observe", "prove.judge.table")
    ], "the control"


def test_the_second_of_two_programs_with_one_name_is_not_taken_for_the_first(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # no other test finds what is loaded here
    first = load_program("beyond/shard", "language")
    with pytest.raises(
        ImportError, match=r"examples/language\.py, but language is .+/shard/language"
    ):
        load_program("beyond/convert/examples", "language")
    assert load_program("beyond/shard", "language") is first, "the control"
