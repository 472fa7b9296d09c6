"""Every stage computes what one plain process computes, and the reasons why are the right ones."""

from functools import cache

import pytest
import torch

import oracle
from support import train, train_once

FLAGS = ("--model=net-bn", "--batch-size=60", "--epochs=2", "--max-steps=30", "--seed=7")
SETTINGS = {"batch": 60, "epochs": 2, "max_steps": 30, "seed": 7, "lr": 0.02, "momentum": 0.9}
WEIGHTS = ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight", "norm1.weight", "fc2.bias")

replayed, HALVES = cache(oracle.replay), oracle.strides(2)
torch.set_num_threads(1)  # the replay's, beside other workers of pytest


def differences(key, ranks, flags, steps, without=(), kinds="", **settings) -> tuple[float, float]:
    """From the replay: the largest of any loss, and of any weight or running statistic."""
    run = train_once(key, ranks, *FLAGS, *flags, without=without)
    losses, state = replayed(steps, **{**SETTINGS, **settings})
    assert run.losses.shape == losses.shape
    compared = [name for name in state if name.endswith(kinds)]
    weights = max((run.states[0][name] - state[name]).abs().max().item() for name in compared)
    return (run.losses - losses).abs().max().item(), weights


def claim(key, ranks, steps, without=(), *flags):
    """And all ranks end with the same weights and statistics."""
    assert max(differences(key, ranks, flags, steps, without)) < 1e-10
    first, *others = train_once(key, ranks, *FLAGS, *flags, without=without).states
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


# Each able to run with lines of the stage left out: test_break_it does so, and they must fail then.


def test_01_repeats_the_batches_of_a_plain_loop(without=()):
    claim("01", 1, oracle.whole_batches, without)


def test_02_replicas_compute_the_step_of_one_device(without=()):
    claim("02", 1, oracle.chunks(3), without, "--replicas=3")


def test_03_gradients_equal_one_process_on_the_whole_batch(without=()):
    claim("03", 2, oracle.fixed_shards(2), without)


def test_04_gradients_equal_one_process_on_the_whole_batch(without=()):
    claim("04", 2, HALVES, without)


def test_05_synchronized_batchnorm_repeats_one_process(without=()):
    claim("05", 2, oracle.whole_batches, without)


CASES = [
    pytest.param("03", 3, (), oracle.fixed_shards(3), id="03-three-ranks"),
    pytest.param("04", 1, (), oracle.whole_batches, id="04-one-rank"),
    pytest.param("04", 3, (), oracle.strides(3), id="04-three-ranks"),
    pytest.param("02", 1, ("--replicas=1",), oracle.whole_batches, id="02-one-replica"),
    pytest.param("05", 1, (), oracle.whole_batches, id="05-one-rank"),
    pytest.param("05", 3, (), oracle.whole_batches, id="05-three-ranks"),
    pytest.param("05", 2, ("--no-sync-bn",), HALVES, id="05-without-sync-bn"),
    pytest.param("survive", 1, (), oracle.whole_batches, id="survive-one-rank"),
    pytest.param("survive", 3, (), oracle.whole_batches, id="survive-three-ranks"),
]


@pytest.mark.parametrize(("key", "ranks", "flags", "steps"), CASES)
def test_losses_and_weights_equal_one_process_that_replays_the_batches(key, ranks, flags, steps):
    claim(key, ranks, steps, (), *flags)


def test_04_without_synchronized_batchnorm_does_not_repeat_one_process():
    """The control of the claim above: the plain BatchNorm of two ranks is another computation."""
    assert min(differences("04", 2, (), oracle.whole_batches)) > 1e-3


def test_03_without_allreduce_the_ranks_drift_apart():
    alone = (("train.py", "average_gradients(model)"),)
    first, second = train_once("03", 2, *FLAGS, without=alone).states
    assert max((first[name] - second[name]).abs().max() for name in WEIGHTS) > 1e-3


def test_in_fp32_the_first_epoch_of_05_is_that_of_01_and_that_of_04_is_not():
    one, two, local = (
        train_once(key, ranks, *FLAGS, dtype=torch.float32).losses[: 1500 // 60]
        for key, ranks in (("01", 1), ("05", 2), ("04", 2))
    )
    assert (one - two).abs().max() < 1e-4 < (one - local).abs().max()


def test_on_three_ranks_a_resumed_run_is_the_same_up_to_rounding():
    """DDP sorts its buckets after its first step. beyond/survive/train.py resumes to the bit."""
    part = train("05", 3, *FLAGS, "--max-steps=25")
    resumed = train("05", 3, *FLAGS, "--resume=auto", folder=part.folder)
    whole = train_once("05", 3, *FLAGS).states[0]
    assert all((whole[n] - each).abs().max() < 1e-12 for n, each in resumed.states[0].items())
