"""The notebooks: what they show is true today, and each runs from top to bottom."""

import copy
import os
import re
import time
from importlib import import_module
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import matplotlib
import pytest
import torch
from ipykernel.kernelapp import IPKernelApp

from helpers.small_data import few_digits
from local_ranks.chapters import ROOT
from local_ranks.ranks import PROCESS_DEFAULTS

NOTEBOOKS = ROOT / "notebooks"


@pytest.fixture(scope="module")
def execute() -> ModuleType:
    """The program that runs a notebook. It takes 2 s to import, and no kernel needs it."""
    return import_module("execute")


def pictures_of(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def run_kernel(env, flags, folder):
    """Be the kernel of a notebook, whose ranks are forks of it."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(env)
    inline = "module://matplotlib_inline.backend_inline"
    matplotlib.rcParams["backend"] = inline  # the kernel says so to those who import it later
    PROCESS_DEFAULTS.start_method = "fork"
    IPKernelApp.launch_instance(argv=flags)


def quick_kernel(command, env, cwd, **_):
    """Stand in for Popen, so that the kernel and its ranks need not import torch again."""
    flags = command[command.index("-f") :]
    process = PROCESS_DEFAULTS.context().Process(target=run_kernel, args=(env, flags, cwd))
    process.start()
    while os.getpgid(process.pid) != process.pid:  # its group gets the signals
        time.sleep(0.01)
    there = {"pid": process.pid, "poll": lambda: process.exitcode, "wait": process.join}
    return SimpleNamespace(**there, stdout=None, stderr=None, stdin=None)


QUICK_KERNEL = patch("jupyter_client.provisioning.local_provisioner.launch_kernel", quick_kernel)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("0*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_again_and_shows_the_same(path, execute):
    """Fresh measurements differ, each in a cell with that tag; all else is the same."""
    notebook = execute.read(path)
    is_fresh = notebook.metadata[execute.STAMP] == execute.stamp()
    assert is_fresh, "it is older than what it shows: make notebooks"
    with QUICK_KERNEL:
        executed, answers = execute.run(notebook, quick=True)
    for before, after in zip(notebook.cells, executed.cells, strict=True):
        assert not execute.errors_of(after), after.source
        if "not kept" in execute.tags(before):
            assert before.outputs == []
            continue
        assert pictures_of(after) == pictures_of(before), after.source
        if "measured" not in execute.tags(before):
            assert execute.text_of(after) == execute.text_of(before), after.source
    assert answers
    for answer in answers:
        assert answer.right.startswith("Right"), answer
        assert answer.wrong.startswith("Not yet"), answer


def test_a_notebook_begins_with_its_name_and_says_when_to_read_it_and_how_long_it_takes(execute):
    for path in execute.NOTEBOOKS:
        first, *_ = execute.read(path).cells
        assert first.source.startswith(f"# Notebook {path.name[:2]} · "), path.name
        assert re.search(r"^\*\*After\*\* \[stage 0\d\].*minutes", first.source, re.M), path.name


def test_two_of_the_three_other_lines_that_notebook_03_leaves_out_change_nothing(execute):
    """It says so; and each is a line of stage 03, so that a reader can leave it out."""
    same = import_module("same_result")
    cells = execute.read(NOTEBOOKS / "03_same_result.ipynb").cells
    lines = [line for cell in cells for line in re.findall(r"^- `(.+?)`:", cell.source, re.M)]
    assert len(lines) == 3
    with patch.object(same.train_stage, "ON_CPU", (*same.train_stage.ON_CPU, *few_digits())):
        losses = same.train("03 by hand").losses
        found = {line: same.train("03 by hand", leave_out=line).losses for line in lines}
    unchanged = [line for line, its in found.items() if torch.allclose(its, losses, atol=1e-10)]
    assert unchanged == lines[1:]


def test_what_notebook_02_lets_a_reader_change_moves_the_bytes_that_its_text_says():
    held_by_rank = import_module("memory_lab").held_by_rank
    small = {"model": "net-bn", "pixels": 28}
    before = held_by_rank(**small)
    doubled = {kind: 2 * before[kind] for kind in ("batch", "activations", "outputs and loss")}
    assert held_by_rank(**small, batch=128) == pytest.approx({**before, **doubled}, rel=0.01)
    with_adam = held_by_rank(**small, optimizer="adam")["optimizer"]  # it also counts its steps
    assert with_adam == pytest.approx(2 * before["optimizer"], rel=0.01)
    one_of_two = held_by_rank(**small, ranks=2)
    assert one_of_two["buckets"] == before["gradients"] == one_of_two["gradients"]
    assert one_of_two["activations"] == pytest.approx(before["activations"] / 2, rel=0.01)
    in_bf16 = held_by_rank(**small, bf16=True)["activations"]
    assert before["activations"] / 2 < in_bf16 < before["activations"]


def test_notebook_01_counts_a_message_for_each_parameter_by_hand_and_one_in_ddp():
    steps = import_module("two_ranks").measure("net-bn", batch=8, rounds=1)
    assert steps.messages == {"never talk": 0, "03 by hand": 12, "04 DDP": 1}
    assert "12" in str(steps)


def test_the_notebook_for_two_gpus_trains_on_two_cpu_ranks_where_there_is_no_gpu(execute):
    if torch.cuda.is_available():
        pytest.skip("here are GPUs: it would run `make gpu` for ten minutes")
    made = execute.read(NOTEBOOKS / "two_gpus.ipynb")
    shown = [execute.text_of(cell) for cell in made.cells]
    folder = {"metadata": {"path": str(NOTEBOOKS)}}
    with QUICK_KERNEL:
        execute.NotebookClient(made, timeout=300, kernel_name="python3", resources=folder).execute()
    for text, cell in zip(shown, made.cells, strict=True):
        assert not execute.errors_of(cell)
        if "measured" in execute.tags(cell):
            assert "global batch 120 = 2 × 60\nepoch 1/2" in execute.text_of(cell)
        else:
            assert execute.text_of(cell) == text


def test_the_colab_notebook_clones_a_given_address_and_two_ranks_train_and_are_proven(
    execute, tmp_path
):
    """It refuses the address that it comes with; from a real one, it needs nothing but a clone."""
    if torch.cuda.is_available() or not (ROOT / ".git").exists():
        pytest.skip("it needs a clone, and would train on GPUs")
    made = execute.read(NOTEBOOKS / "colab.ipynb")
    first = next(cell for cell in made.cells if "REPOSITORY = " in cell.source)
    refused = copy.deepcopy(first)
    refused.metadata["tags"] = ["raises-exception"]
    shown = [execute.text_of(cell) for cell in made.cells]
    first.source = re.sub('REPOSITORY = ".+"', f'REPOSITORY = "file://{ROOT}"', first.source)
    made.cells.insert(0, refused)
    for cell in made.cells:
        cell.source = cell.source.replace("--epochs 5", "--epochs 1")
    folder = {"metadata": {"path": str(tmp_path)}}
    with QUICK_KERNEL:
        execute.NotebookClient(made, timeout=300, kernel_name="python3", resources=folder).execute()
    (error,) = [each for each in refused.outputs if each.output_type == "error"]
    assert (error.ename, "address" in error.evalue) == ("SystemExit", True)
    texts = [execute.text_of(cell) for cell in made.cells[1:]]
    assert (tmp_path / "course/runs/04_ddp_torchrun/summary.json").exists()
    for text, old_text, cell in zip(texts, shown, made.cells[1:], strict=True):
        assert not execute.errors_of(cell), cell.source
        if "measured" in execute.tags(cell):  # what was trained or compared, without the numbers
            what, old_what = (re.split(r" loss|, in \d+ s", each)[0] for each in (text, old_text))
            what, old_what = (re.sub(r"\d+e-\d+", "", each) for each in (what, old_what))
            assert what == old_what.replace("1/5", "1/1"), cell.source
        else:
            assert text == old_text
