"""The smallest pair: 04's minimal.py computes the same on one rank and on two, and as 01's."""

import os
import runpy
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from helpers.on_ranks import run_on_ranks
from local_ranks.chapters import ROOT
from local_ranks.machine import scratch_folder
from local_ranks.stage_files import replace_once
from local_ranks.train_stage import default_dtype

SINGLE, DDP = (ROOT / f"{stage}/minimal.py" for stage in ("01_single_gpu", "04_ddp_torchrun"))
# 01 draws an order of its own. To compare, it gets that of 04.
DEALT = ("shuffle=True)", "sampler=torch.utils.data.DistributedSampler(train_set, 1, 0))")
EACH_EPOCH = ("epoch in range(2):", "epoch in range(2):\n    loader.sampler.set_epoch(epoch)")
TWO_EPOCHS = ("epoch in range(5):", "epoch in range(2):")


def run_minimal(rank: int, source: str, folder: Path) -> str:
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
def run(script: Path, ranks: int, *changes: tuple[str, str]) -> MinimalRun:
    """The script on so many ranks, with pieces of it replaced."""
    source = replace_once(script.read_text(), TWO_EPOCHS, *changes)
    folder = scratch_folder()
    outputs = run_on_ranks(ranks, run_minimal, source, folder)
    return MinimalRun(outputs, torch.load(folder / "model.pt", weights_only=True))


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def test_two_ranks_print_what_one_prints_and_reach_its_weights():
    one, two = run(DDP, 1), run(DDP, 2)
    assert distance(one.weights, two.weights) < 1e-10
    [output] = one.outputs
    assert two.outputs == [output, ""], "only rank 0 prints, and it counts each test sample once"
    assert float(output.split()[-4].rstrip("%")) > 80, "it learns"


def run_on_a_mac(rank: int, source: str, folder: Path) -> str:
    """What the script prints, or how it fails, where torch sees a GPU of Apple's."""
    mps = torch.device("mps")
    with patch.object(torch.accelerator, "current_accelerator", lambda check_available=False: mps):
        try:
            return run_minimal(rank, source, folder)
        except RuntimeError as error:
            return str(error)


def test_it_trains_on_the_cpu_of_a_mac():
    """The control: a group without a named backend takes only tensors of Apple's GPU there."""
    source = replace_once(DDP.read_text(), ("epoch in range(5):", "epoch in range(1):"))
    unnamed = replace_once(source, ('"nccl" if device.type == "cuda" else "gloo"', ""))
    first, second = run_on_ranks(2, run_on_a_mac, source, scratch_folder())
    assert (first.startswith("epoch 0"), second) == (True, "")
    answers = run_on_ranks(2, run_on_a_mac, unnamed, scratch_folder())
    assert all("No backend type associated with device type cpu" in each for each in answers)


def test_in_the_same_order_the_script_for_one_gpu_reaches_the_same_weights():
    """The control: in its own order, it does not."""
    single, ddp = run(SINGLE, 1, DEALT, EACH_EPOCH), run(DDP, 2)
    assert single.outputs[0] == ddp.outputs[0]
    assert distance(single.weights, ddp.weights) < 1e-10
    assert distance(run(SINGLE, 1).weights, ddp.weights) > 1e-3


NEEDED = [
    ("ddp(x.", "model(x."),
    ("sampler.set_epoch(epoch)", "pass"),
    ("120 // world_size", "120"),
]


@pytest.mark.parametrize("change", NEEDED)
def test_each_changed_line_of_the_minimal_pair_is_needed(change):
    """The control: around DDP, in one order for all epochs, with another global batch."""
    single = run(SINGLE, 1, DEALT, EACH_EPOCH)
    assert distance(single.weights, run(DDP, 2, change).weights) > 1e-3


def test_without_the_all_reduce_a_rank_counts_its_own_samples_only():
    not_reduced = run(DDP, 2, ("    dist.all_reduce(correct)", ""))
    assert not_reduced.outputs[0] != run(DDP, 1).outputs[0]
