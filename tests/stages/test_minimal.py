"""The smallest pair: on two ranks, 04's minimal.py trains and counts as 01's does on one."""

import os
import runpy
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from helpers.local_ranks import ROOT, launch_function, scratch_folder
from helpers.train_stage import default_dtype

SCRIPTS = {1: ROOT / "01_single_gpu" / "minimal.py", 2: ROOT / "04_ddp_torchrun" / "minimal.py"}


def run_script(rank: int, source: str, folder: Path) -> str:
    """What the script prints; it saves its weights in the folder."""
    os.chdir(folder)
    script = Path(f"minimal_{rank}.py")
    script.write_text(source)
    with default_dtype(torch.float64), redirect_stdout(StringIO()) as output:
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


class MinimalRun(NamedTuple):
    outputs: list[str]  # what each rank prints
    weights: dict[str, torch.Tensor]


@cache
def run(ranks: int, old: str = "", new: str = "") -> MinimalRun:
    """The script on so many ranks, with one piece of it replaced."""
    source, folder = SCRIPTS[ranks].read_text(), scratch_folder()
    assert old in source
    outputs = launch_function(ranks, run_script, source.replace(old, new), folder)
    return MinimalRun(outputs, torch.load(folder / "model.pt", weights_only=True))


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def test_the_minimal_pair_trains_and_counts_the_same():
    single, ddp = run(1), run(2)
    assert distance(single.weights, ddp.weights) < 1e-10
    [output] = single.outputs
    assert ddp.outputs == [output, ""], "only rank 0 prints, and it counts each test sample once"
    assert float(output.split()[-4].rstrip("%")) > 80, "it learns"


@pytest.mark.parametrize(
    ("old", "new"),
    [("ddp(x.", "model(x."), ("sampler.set_epoch(epoch)", "pass"), ("100 // world_size", "100")],
)
def test_each_changed_line_of_the_minimal_pair_is_needed(old, new):
    """The control: around DDP, in one order for all epochs, with another global batch."""
    assert distance(run(1).weights, run(2, old, new).weights) > 1e-3


def test_without_the_all_reduce_a_rank_counts_its_own_samples_only():
    not_reduced = run(2, "    dist.all_reduce(correct)")
    assert not_reduced.outputs[0] != run(1).outputs[0]
