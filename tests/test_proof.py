"""Every stage computes what one plain process computes, and the reasons why are the right ones."""

import oracle
import pytest
import torch
from support import Line, train, train_once

FLAGS = ("--model=net-bn", "--batch-size=60", "--epochs=2", "--seed=7", "--lr=0.02")
SETTINGS = {"batch": 60, "epochs": 2, "seed": 7, "lr": 0.02, "momentum": 0.9}
WEIGHTS = ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight", "norm1.weight", "fc2.bias")

CASES = [
    pytest.param("01", 1, (), oracle.whole_batches, id="01"),
    pytest.param("02", 1, ("--replicas=3",), oracle.chunks(3), id="02-three-replicas"),
    pytest.param("03", 2, (), oracle.fixed_shards(2), id="03-two-ranks"),
    pytest.param("03", 3, (), oracle.fixed_shards(3), id="03-three-ranks"),
    pytest.param("04", 1, (), oracle.whole_batches, id="04-one-rank"),
    pytest.param("04", 2, (), oracle.strides(2), id="04-two-ranks"),
    pytest.param("04", 3, (), oracle.strides(3), id="04-three-ranks"),
    pytest.param("05", 1, (), oracle.whole_batches, id="05-one-rank"),
    pytest.param("05", 2, (), oracle.whole_batches, id="05-two-ranks"),
    pytest.param("05", 3, (), oracle.whole_batches, id="05-three-ranks"),
    pytest.param("05", 2, ("--no-sync-bn",), oracle.strides(2), id="05-without-sync-bn"),
    pytest.param("survive", 1, (), oracle.whole_batches, id="survive-one-rank"),
    pytest.param("survive", 2, (), oracle.whole_batches, id="survive-two-ranks"),
    pytest.param("survive", 3, (), oracle.whole_batches, id="survive-three-ranks"),
]

RANKS = [("03", 3), ("04", 2), ("04", 3), ("05", 2), ("05", 3), ("survive", 2), ("survive", 3)]
AS_01 = [("04", 1), ("05", 1), ("05", 2), ("05", 3), ("survive", 1), ("survive", 3)]


def differences(key, ranks, extra, steps, without: tuple[Line, ...] = ()) -> tuple[float, float]:
    """The largest difference from the replay: of any loss, of any weight or running statistic."""
    run = train_once(key, ranks, *FLAGS, *extra, without=without)
    losses, state = oracle.replay(steps, **SETTINGS)
    assert run.losses.shape == losses.shape
    weights = max((run.states[0][k] - v).abs().max().item() for k, v in state.items())
    return (run.losses - losses).abs().max().item(), weights


@pytest.mark.parametrize(("key", "ranks", "extra", "steps"), CASES)
def test_losses_and_weights_equal_one_process_that_replays_the_batches(key, ranks, extra, steps):
    loss, weight = differences(key, ranks, extra, steps)
    assert loss < 1e-10
    assert weight < 1e-10


def claim(key, ranks, steps, without, *extra):
    assert max(differences(key, ranks, extra, steps, without)) < 1e-10


# The same claims, one by one, each able to run with lines of the stage left out: test_break_it
# does so, and they must fail then.


def test_01_repeats_the_batches_of_a_plain_loop(without=()):
    claim("01", 1, oracle.whole_batches, without)


def test_02_replicas_compute_the_step_of_one_device(without=()):
    claim("02", 1, oracle.chunks(3), without, "--replicas=3")


def test_03_gradients_equal_one_process_on_the_whole_batch(without=()):
    claim("03", 2, oracle.fixed_shards(2), without)


def test_04_gradients_equal_one_process_on_the_whole_batch(without=()):
    claim("04", 2, oracle.strides(2), without)


def test_05_synchronized_batchnorm_repeats_one_process(without=()):
    claim("05", 2, oracle.whole_batches, without)


def test_04_without_synchronized_batchnorm_does_not_repeat_one_process():
    """The control of the claim above: the plain BatchNorm of two ranks is another computation."""
    loss, weight = differences("04", 2, (), oracle.whole_batches)
    assert loss > 1e-3
    assert weight > 1e-3


def test_03_without_allreduce_the_ranks_drift_apart():
    line = (("train.py", "average_gradients(model)"),)
    alone, together = (train_once("03", 2, *FLAGS, without=w).states for w in (line, ()))
    assert max((alone[0][name] - alone[1][name]).abs().max() for name in WEIGHTS) > 1e-3
    assert all(torch.equal(together[0][name], together[1][name]) for name in WEIGHTS)


@pytest.mark.parametrize(("key", "ranks"), RANKS)
def test_all_ranks_end_with_the_same_weights_and_statistics(key, ranks):
    first, *others = train_once(key, ranks, *FLAGS).states
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("key", "ranks"), AS_01)
def test_in_fp32_the_losses_of_the_first_epoch_are_those_of_01(key, ranks):
    one = train_once("01", 1, *FLAGS, dtype=torch.float32)
    many = train_once(key, ranks, *FLAGS, dtype=torch.float32)
    steps = 1500 // 60
    assert (one.losses - many.losses)[:steps].abs().max() < 1e-4


def test_in_fp32_04_on_two_ranks_is_farther_from_01_than_rounding():
    one, two = (train_once(k, n, *FLAGS, dtype=torch.float32) for k, n in (("01", 1), ("04", 2)))
    assert (one.losses - two.losses)[:25].abs().max() > 1e-4


def test_the_same_command_gives_the_same_bits():
    first, second = (train("05", 2, *FLAGS, dtype=torch.float32) for _ in range(2))
    assert torch.equal(first.losses, second.losses)
