"""Execute the notebooks, and tell whether what they show is older than what it was made of.

    python notebooks/execute.py 01 04

`make notebooks` executes all of them in place, and each keeps the digest of what pictures are made
of: the committed results and the programs. In a test a notebook runs again: it may not fail, its
texts must be the same (but for cells with the tag `measured`), and each exercise must take the
right answer and refuse a wrong one: the next cell with the tag `check` judges. Both answers stand
in the metadata of its cell, and what they replace there, which is `None` otherwise. So does, as
`quick`, what makes a long measurement or training short in a test: texts of the cell, and what
replaces them. What a cell with the tag `not kept` shows is for the reader's eyes: a speed that was
measured in a hurry must not be quoted, nor an answer given away.
"""

import copy
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from benchmarks.result_files import MACHINE, RESULTS
from local_ranks.chapters import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.ipynb"))
SECONDS = 300  # more than any cell takes
STAMP = "made_of"
NOT_SHOWN = ("execute", "find_the_mistake", "start")  # nothing that a notebook shows is theirs
KEPT = ("tags", "blank", "right", "wrong", "quick")  # of a cell's metadata


class Answers(NamedTuple):
    """What a check says to the right answer, and to a wrong one."""

    right: str
    wrong: str


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


def exercises(cells: Sequence[NotebookNode]) -> list[tuple[NotebookNode, NotebookNode]]:
    """Each exercise, with the check that comes after it."""
    asked = [cell for cell in cells if "exercise" in tags(cell)]
    return list(zip(asked, [cell for cell in cells if "check" in tags(cell)], strict=True))


def run(notebook: NotebookNode, quick: bool = False) -> tuple[NotebookNode, list[Answers]]:
    """A copy with fresh outputs, and what each check says to each answer."""
    executed = copy.deepcopy(notebook)
    if quick:
        for cell in executed.cells:
            cell.source = quick_source(cell)
    length = len(executed.cells)
    for asked, check in exercises(executed.cells):
        for kind in ("right", "wrong"):
            blank = asked.metadata.get("blank", "None")
            answer = asked.source.replace(blank, asked.metadata[kind], 1)
            executed.cells += [new_code_cell(answer), new_code_cell(check.source)]
    with patch.dict(os.environ, SHOWN_MACHINE=MACHINE):  # not a reader's own
        folder = {"metadata": {"path": str(ROOT / "notebooks")}}
        client = NotebookClient(executed, timeout=SECONDS, kernel_name="python3", resources=folder)
        client.execute()
    said = [text_of(check) for check in executed.cells[length + 1 :: 2]]
    del executed.cells[length:]
    for cell in executed.cells:  # not when each cell ran, nor what an editor has left there
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in KEPT}
    return executed, [Answers(*pair) for pair in zip(said[::2], said[1::2], strict=True)]


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
    own = [path for path in (ROOT / "notebooks").glob("*.py") if path.stem not in NOT_SHOWN]
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
    print(path.name)
    for each in answers:
        print(f"  right: {each.right}  wrong: {each.wrong}", end="")


if __name__ == "__main__":
    for each in NOTEBOOKS:
        if not sys.argv[1:] or each.name[:2] in sys.argv[1:]:
            execute_in_place(each)
