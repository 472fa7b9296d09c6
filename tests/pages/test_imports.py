"""No import leads back to its own module, and a program is never mistaken for another one."""

import ast
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from common.chapters import ROOT, load_chapter

FOLDERS = ("packages/prove/src/prove", "packages/shm/src/shm", "common", "benchmarks")

Graph = dict[str, set[str]]  # of each module, those that it imports


def sources_of(folder: str) -> dict[str, str]:
    """By the names that their imports use: shm, shm.work; of scripts, timing."""
    path, package = ROOT / folder, Path(folder).name
    prefix = f"{package}." if (path / "__init__.py").exists() else ""
    sources = {prefix + file.stem: file.read_text() for file in path.glob("*.py")}
    return {name.removesuffix(".__init__"): source for name, source in sources.items()}


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


def test_the_second_of_two_programs_with_one_name_is_not_taken_for_the_first(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # no other test finds what is loaded here
    first = load_chapter("beyond/shard", "language")
    with pytest.raises(
        ImportError, match=r"examples/language\.py, but language is .+/shard/language"
    ):
        load_chapter("beyond/convert/examples", "language")
    assert load_chapter("beyond/shard", "language") is first, "the control"
