"""No import leads back to its own module, and what measures imports nothing that draws."""

import ast
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from helpers.local_ranks import ROOT

FOLDERS = ("packages/prove/src/prove", "packages/shm/src/shm", "common", "benchmarks")
MEASURING = ("bench", "gpu", "measure_memory", "measure_reducers", "measure_stages", "measure_tour")
MEASURING += ("stage_runs", "timing", "tour", "training_step")

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


def needs(graph: Graph, module: str) -> set[str]:
    """What it imports, and what that imports, and so on."""
    return graph[module].union(*(needs(graph, other) for other in graph[module]))


def test_what_measures_imports_nothing_that_draws():
    graph = graph_of(sources_of("benchmarks"))
    for module in MEASURING:
        assert needs(graph, module).isdisjoint({"pictures", "plots", "svg"}), module
    assert "svg" in needs(graph, "pictures"), "the control"
