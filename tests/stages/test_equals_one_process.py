"""Every stage computes what one plain process computes, and the reasons why are the right ones.

The plain process is oracle.py: it replays in float64 which samples each step saw, and how BatchNorm
grouped them. Losses and weights then differ by less than 1e-10, and where the mechanism of a stage
is missing, by more than 1e-3.
"""

from typing import NamedTuple

import pytest
import torch

from helpers.replayed_runs import assert_repeats, distances, replayed_flags
from local_ranks import oracle
from local_ranks.train_stage import train_once

# One claim for each stage. test_break_it.py runs them without a line of the stage: then they fail.


def test_01_repeats_the_batches_of_a_plain_loop(changes=()):
    assert_repeats(oracle.whole_batches, "01", 1, changes=changes)


def test_02_replicas_compute_the_step_of_one_device(changes=()):
    assert_repeats(oracle.chunks(3), "02", 1, "--replicas=3", changes=changes)


def test_03_gradients_equal_one_process_on_the_whole_batch(changes=()):
    assert_repeats(oracle.strides(2), "03", 2, changes=changes)


def test_04_gradients_equal_one_process_on_the_whole_batch(changes=()):
    assert_repeats(oracle.strides(2), "04", 2, changes=changes)


def test_05_synchronized_batchnorm_repeats_one_process(changes=()):
    assert_repeats(oracle.whole_batches, "05", 2, changes=changes)


class ReplayedRun(NamedTuple):
    key: str
    ranks: int
    flags: list[str]
    steps: oracle.BatchSchedule  # the oracle's, which the run must repeat


OTHER_RUNS = {
    "03 on three ranks": ReplayedRun("03", 3, [], oracle.strides(3)),
    "04 on one rank": ReplayedRun("04", 1, [], oracle.whole_batches),
    "04 on three ranks": ReplayedRun("04", 3, [], oracle.strides(3)),
    "05 on three ranks": ReplayedRun("05", 3, [], oracle.whole_batches),
    "05 without SyncBatchNorm": ReplayedRun("05", 2, ["--no-sync-bn"], oracle.strides(2)),
    "survive on three ranks": ReplayedRun("survive", 3, [], oracle.whole_batches),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_losses_and_weights_equal_one_process_that_replays_the_batches(name):
    run = OTHER_RUNS[name]
    assert_repeats(run.steps, run.key, run.ranks, *run.flags)


def test_04_without_synchronized_batchnorm_does_not_repeat_one_process():
    """The control of the claim for 05: two ranks with plain BatchNorm compute something else."""
    assert min(distances("04", 2, (), oracle.whole_batches)) > 1e-3


def test_03_and_04_take_the_same_steps_and_dropout_is_all_that_keeps_them_from_01():
    """One averages by a loop, the other in DDP. The control: with dropout, 01 is far away."""
    flags = (*replayed_flags(), "--model=net", "--max-steps=8")
    by_hand, ddp = (train_once(key, 2, *flags).losses for key in ("03", "04"))
    assert (by_hand - ddp).abs().max() < 1e-10
    assert (by_hand - train_once("01", 1, *flags).losses).abs().max() > 1e-3
    no_dropout = (("train.py", ".train()", ".eval()"),)
    one, two = (
        train_once(*way, *flags, changes=no_dropout).losses for way in (("01", 1), ("03", 2))
    )
    assert (one - two).abs().max() < 1e-10


def test_03_without_allreduce_the_ranks_drift_apart():
    """The control of the claim for 03."""
    no_all_reduce = (("train.py", "average_gradients(model)"),)
    first, second = train_once("03", 2, *replayed_flags(), changes=no_all_reduce).states
    assert (first["fc1.weight"] - second["fc1.weight"]).abs().max() > 1e-3


def test_in_fp32_the_first_epoch_of_05_is_that_of_01_and_that_of_04_is_not():
    """In the precision in which one trains, rounding hides nothing that the lesson is about."""
    losses_01, losses_05, losses_04 = (
        train_once(key, ranks, *replayed_flags(), "--epochs=1", dtype=torch.float32).losses
        for key, ranks in (("01", 1), ("05", 2), ("04", 2))
    )
    assert (losses_01 - losses_05).abs().max() < 1e-4
    assert (losses_01 - losses_04).abs().max() > 1e-4
