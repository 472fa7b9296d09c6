"""Execute the notebooks, and tell whether what they show is older than what it was made of.

    python notebooks/execute.py 01 04

`make notebooks` executes all of them in place, and each keeps the digest of what pictures are made
of: the committed results and the programs. In a test a notebook runs again: it may not fail, its
texts must be the same (but for cells with the tag `measured`), and the exercise must take the right
answer and refuse a wrong one. Both stand in the metadata of its cell, and what they replace there,
which is `None` otherwise. So does, as `quick`, what makes a long measurement or training short in a
test: texts of the cell, and what replaces them. What a cell with the tag `not kept` shows is for
the reader's eyes: a speed that was measured in a hurry must not be quoted.
"""

import copy
import hashlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from benchmarks.result_files import MACHINE, RESULTS
from common.chapters import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.ipynb"))
SECONDS = 300  # more than any cell takes
STAMP = "made_of"
KEPT = ("tags", "blank", "right", "wrong", "quick")  # of a cell's metadata


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def quick_source(cell: NotebookNode) -> str:
    """The cell's source with what its metadata replaces for a test; each text must be there."""
    source: str = cell.source
    for old, new in cell.metadata.get("quick", {}).items():
        if source.count(old) != 1:
            raise ValueError(f"{source.count(old)} times in the cell, expected once: {old}")
        source = source.replace(old, new)
    return source


def run(notebook: NotebookNode, quick: bool = False) -> tuple[NotebookNode, dict[str, str]]:
    """A copy with fresh outputs, and what the check says to each answer."""
    executed = copy.deepcopy(notebook)
    if quick:
        for cell in executed.cells:
            cell.source = quick_source(cell)
    asked = next(cell for cell in executed.cells if "exercise" in tags(cell))
    checks = next(cell for cell in executed.cells if "check" in tags(cell))
    for kind in ("right", "wrong"):
        answer = asked.source.replace(asked.metadata.get("blank", "None"), asked.metadata[kind], 1)
        executed.cells += [new_code_cell(answer), new_code_cell(checks.source)]
    with patch.dict(os.environ, SHOWN_MACHINE=MACHINE):  # not a reader's own
        folder = {"metadata": {"path": str(ROOT / "notebooks")}}
        client = NotebookClient(executed, timeout=SECONDS, kernel_name="python3", resources=folder)
        client.execute()
    *executed.cells, _, right, _, wrong = executed.cells
    for cell in executed.cells:  # not when each cell ran, nor what an editor has left there
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in KEPT}
    return executed, {"right": text_of(right), "wrong": text_of(wrong)}


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def text_of(cell: NotebookNode) -> str:
    """What the cell shows, without its pictures."""
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", [])
        if "image/png" not in output.get("data", {})
    ]
    return "".join(texts)


def errors_of(cell: NotebookNode) -> str:
    """What the cell wrote to stderr: a warning that a reader would see too."""
    return "".join(o.text for o in cell.get("outputs", []) if o.get("name") == "stderr")


def made_of() -> list[Path]:
    """The results that are committed, and the programs that draw them."""
    results = [*RESULTS.glob("*.json"), *RESULTS.glob("once/*.json"), RESULTS / f"{MACHINE}.json"]
    own = [ROOT / "notebooks" / name for name in ("measure_link.py", "plots.py", "same_result.py")]
    folders = (ROOT / "benchmarks", ROOT / "docs/pictures")
    return sorted([*results, *(path for each in folders for path in each.rglob("*.py")), *own])


def stamp() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in made_of())).hexdigest()[:12]


def execute_in_place(path: Path) -> None:
    executed, answers = run(read(path))
    for cell in executed.cells:
        if "not kept" in tags(cell):
            cell.outputs, cell.execution_count = [], None
    plain: dict[str, Any] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    executed.metadata = nbformat.from_dict(
        {"kernelspec": plain, "language_info": {"name": "python"}, STAMP: stamp()}
    )
    nbformat.write(executed, path)
    print(f"{path.name}: right: {answers['right']} wrong: {answers['wrong']}")


if __name__ == "__main__":
    for each in NOTEBOOKS:
        if not sys.argv[1:] or each.name[:2] in sys.argv[1:]:
            execute_in_place(each)
