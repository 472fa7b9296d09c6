"""A short run of a stage in float64, and how far the oracle's replay of its batches is from it."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from helpers.small_data import few_digits
from local_ranks import oracle
from local_ranks.stage_files import Change
from local_ranks.train_stage import train_once

SHORT_RUN = ("--model=net-bn", "--batch-size=60", "--epochs=3", "--max-steps=14", "--seed=7")

replay_once = cache(oracle.replay)


def replayed_flags() -> tuple[str, ...]:
    """The flags of the short run; an epoch has 5 steps."""
    return (*SHORT_RUN, *few_digits())


def replayed_training(**options: Any) -> oracle.Training:
    """Describe the short run to the oracle. options: what is different."""
    training = oracle.Training(
        batch=60, epochs=3, max_steps=14, seed=7, lr=0.02, momentum=0.9, data=few_digits()
    )
    return replace(training, **options)


def distances(
    key: str,
    ranks: int,
    flags: tuple[str, ...],
    steps: oracle.BatchSchedule,
    changes: tuple[Change, ...] = (),
    statistics: bool = True,
    **options: Any,
) -> tuple[float, float]:
    """How far a run is from its replay, at most: in any loss, and in any weight.

    flags, options: what is different in this run, as the stage and as the oracle are told.
    statistics: compare BatchNorm's running statistics, too.
    """
    run = train_once(key, ranks, *replayed_flags(), *flags, changes=changes)
    losses, state = replay_once(steps, replayed_training(**options))
    assert run.losses.shape == losses.shape
    names = [name for name in state if statistics or name.endswith(("weight", "bias"))]
    weights = max((run.states[0][name] - state[name]).abs().max().item() for name in names)
    return (run.losses - losses).abs().max().item(), weights


def assert_repeats(
    steps: oracle.BatchSchedule, key: str, ranks: int, *flags: str, changes: tuple[Change, ...] = ()
) -> None:
    """The run has the losses and weights of the replay, and all ranks have the same weights."""
    loss_difference, weight_difference = distances(key, ranks, flags, steps, changes)
    assert loss_difference < 1e-10
    assert weight_difference < 1e-10
    first, *others = train_once(key, ranks, *replayed_flags(), *flags, changes=changes).states
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
