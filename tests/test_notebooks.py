"""The notebooks: what they show is true today, and each runs from top to bottom."""

import ast
import copy
import json

import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook
from support import ROOT

from notebooks import NOTEBOOKS, STAMP, digests, errors_of, read, run, stale, tags, text_of

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def pictures_of(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


@each
def test_a_notebook_runs_again_and_shows_the_same(path):
    """Its fresh measurements differ, each in a cell with that tag; all else is the same."""
    notebook = read(path)
    made, used, said = run(notebook)
    for before, after in zip(notebook.cells, made.cells, strict=True):
        assert not errors_of(after), after.source
        assert pictures_of(after) == pictures_of(before), after.source
        if "measured" not in tags(before):
            assert text_of(after) == text_of(before), after.source
    assert used == notebook.metadata[STAMP]
    assert said["right"].startswith("Right")
    assert said["wrong"].startswith("Not yet")


@each
def test_a_notebook_is_not_older_than_what_it_shows(path):
    assert not stale(read(path)), "run: make notebooks"


def test_a_notebook_is_stale_when_a_result_or_a_program_has_changed():
    """The control."""
    notebook = read(NOTEBOOKS[0])
    for kind in ("results/", "benchmarks/"):
        changed = copy.deepcopy(notebook)
        name = next(name for name in changed.metadata[STAMP] if name.startswith(kind))
        changed.metadata[STAMP][name] = "0" * 12
        assert stale(changed) == [name]
    notebook.metadata[STAMP]["benchmarks/gone.py"] = "0" * 12
    assert stale(notebook) == ["benchmarks/gone.py"]
    assert stale(new_notebook())


def test_what_a_notebook_reads_imports_and_starts_is_noticed():
    """And what it does not, is not."""
    source = """
from start import committed
committed()
import subprocess, sys, timing
subprocess.run([sys.executable, "tour.py", "--help"], capture_output=True)
open("results/faults.json").close()
"""
    ask = new_code_cell(
        "answer = None", metadata={"tags": ["exercise"], "right": "1", "wrong": "2"}
    )
    check = new_code_cell(
        "print('Right' if answer == 1 else 'Not yet')", metadata={"tags": ["check"]}
    )
    _, used, said = run(new_notebook(cells=[new_code_cell(source), ask, check]))
    assert used.keys() >= {
        "notebooks/start.py",
        "benchmarks/timing.py",
        "tour.py",
        "results/faults.json",
    }
    assert not used.keys() & {"results/tour.json", "tests/oracle.py"}
    assert "05_amp_syncbn/train.py" in used, "every notebook is about the stages"
    assert said == {"right": "Right\n", "wrong": "Not yet\n"}


def test_a_cell_that_fails_ends_the_run():
    """The control of the run."""
    cells = [new_code_cell("1 / 0"), new_code_cell("answer = None")]
    cells[1].metadata = {"tags": ["exercise", "check"], "right": "1", "wrong": "2"}
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(new_notebook(cells=cells))


@each
def test_a_notebook_has_the_form_of_the_others(path):
    notebook = read(path)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert "you will learn" in prose[0].lower() + prose[1].lower()
    assert "exercise" in [tag for cell in notebook.cells[-5:] for tag in tags(cell)]
    assert "check" in tags(next(c for c in reversed(notebook.cells) if c.cell_type == "code"))
    assert str(ROOT) not in json.dumps(notebook)
    assert path.stat().st_size < 1_500_000, "pictures are too large for a repository"


def trains(source):
    """Whether code computes gradients, updates weights, or makes a model of its own."""
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if called and node.func.attr in ("backward", "zero_grad", "all_reduce"):
            return True
        if isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(b) for b in node.bases):
            return True
    return False


@each
def test_a_notebook_defines_no_training_code(path):
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert not trains(cell.source), cell.source


def test_training_code_would_be_found():
    """The control."""
    assert trains((ROOT / "01_single_gpu" / "train.py").read_text())
    assert trains("class Net(nn.Module): pass")


def test_there_are_four_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]
    assert digests([str(ROOT / "LICENSE")]) == {}
