"""Execute the notebooks, and tell whether what they show is older than what it was made of.

    python tests/notebooks.py 01 04

`make notebooks` executes all of them in place. Each then keeps the digest of every file of the
repository that it read, imported or started; a test compares. In a test a notebook runs again: it
may not fail, its texts must be the same (but for cells with the tag `measured`), and the exercise
must take the right answer and refuse a wrong one. Both stand in the metadata of its cell.
"""

import copy
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.ipynb"))
SECONDS = 120  # more than any cell takes
STAMP = "made_of"

# Run in the kernel before the first cell: what is opened and started from now on. Modules, whose
# .pyc may be read in place of the .py, are asked for at the end.
WATCH = """
import sys
_used = set()
def _watch(event, args, _used=_used):  # while a kernel ends, its names are gone before this
    if event == "open":
        _used.add(str(args[0]))
    elif event == "subprocess.Popen":
        _used.update(map(str, args[1]))
sys.addaudithook(_watch)
"""
TELL = """
import json, sys
_modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
print(json.dumps(sorted({*_used, *filter(None, _modules)})))
"""


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def run(notebook: NotebookNode) -> tuple[NotebookNode, dict[str, str], dict[str, str]]:
    """A copy with fresh outputs, digests of what it used, what the check says to each answer."""
    made = copy.deepcopy(notebook)
    asked = next(cell for cell in made.cells if "exercise" in tags(cell))
    checks = next(cell for cell in made.cells if "check" in tags(cell))
    own = len(made.cells)
    made.cells.insert(0, new_code_cell(WATCH))
    made.cells.append(new_code_cell(TELL))
    for kind in ("right", "wrong"):
        answer = asked.source.replace("None", f"({asked.metadata[kind]})", 1)
        made.cells.append(new_code_cell(f"{answer}\n{checks.source}"))
    with patch.dict(os.environ, ONLY_RESULTS=",".join(results_of(notebook))):
        folder = {"metadata": {"path": str(ROOT / "notebooks")}}
        client = NotebookClient(made, timeout=SECONDS, kernel_name="python3", resources=folder)
        client.execute()
    *_, used, right, wrong = made.cells
    made.cells = made.cells[1 : own + 1]
    for cell in made.cells:  # not when each cell ran, nor what an editor has left there
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in ("tags", "right", "wrong")}
    for number, cell in enumerate((c for c in made.cells if c.cell_type == "code"), 1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    said = {"right": text_of(right), "wrong": text_of(wrong)}
    return made, digests([*json.loads(text_of(used)), *PROGRAMS]), said


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


def digests(paths: list[str]) -> dict[str, str]:
    """Of each of them that is a program or a result of this repository."""
    found = {}
    for path in {(ROOT / path).resolve() for path in paths}:
        inside = path.is_relative_to(ROOT) and path.suffix in (".py", ".json") and path.exists()
        if inside and path.relative_to(ROOT).parts[0] in KEPT:
            found[str(path.relative_to(ROOT))] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return dict(sorted(found.items()))


PROGRAMS = [str(path) for path in ROOT.glob("0?_*/train.py")]  # ranks read them unwatched
KEPT = {"common", "benchmarks", "results", "tests", "notebooks", "tour.py"} | {
    path.name for path in ROOT.glob("0?_*")
}


def results_of(notebook: NotebookNode) -> list[str]:
    """The files under results/ that it was made of; none before its first run."""
    made_of = notebook.metadata.get(STAMP, {})
    return [Path(name).name for name in made_of if name.startswith("results/")]


def stale(notebook: NotebookNode) -> list[str]:
    """What it was made of and has changed since."""
    made_of: dict[str, str] = notebook.metadata.get(STAMP, {})
    now = digests(list(made_of))
    changed = [name for name, digest in made_of.items() if now.get(name) != digest]
    return changed if made_of else ["it was never stamped"]


def execute_in_place(path: Path) -> None:
    notebook = read(path)
    notebook.metadata.pop(STAMP, None)  # all results count
    made, used, said = run(notebook)
    plain: dict[str, Any] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = nbformat.from_dict(
        {"kernelspec": plain, "language_info": {"name": "python"}, STAMP: used}
    )
    nbformat.write(made, path)
    print(f"{path.name}: {len(used)} files used; right: {said['right']} wrong: {said['wrong']}")


if __name__ == "__main__":
    for each in NOTEBOOKS:
        if not sys.argv[1:] or each.name[:2] in sys.argv[1:]:
            execute_in_place(each)
