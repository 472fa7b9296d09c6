"""beyond/shard: a checkpoint holds the whole state, and each rank only its part of it.

A run saved on two ranks goes on on three, in one plain process, and with PyTorch's classes.
"""

import copy
import io
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

from benchmarks.measure.sharding import held_by_kind
from helpers.on_ranks import run_on_ranks
from shard_cases import (
    BY_HAND,
    OPTIMIZERS,
    STEPS,
    ZERO_1,
    batches,
    build,
    changed_levels,
    collect,
    join,
    largest_difference,
    loss_of,
    one_process,
    states_of,
    train_steps,
)


def resumed(
    rank: int, cases: list, name: str = "transformer", optimizer: str = "adamw"
) -> list[tuple]:
    """Two steps, from the start or from a saved state; returns the full state_dicts."""
    join("gloo")
    levels, (optimizer_class, options), states = changed_levels(), OPTIMIZERS[optimizer], []
    for level, library, state in cases:
        make_training = levels.by_library if library else levels.by_hand
        training = make_training(level, build(name), optimizer_class, **options)
        contents = torch.load(io.BytesIO(state), weights_only=True) if state else ()
        for part, content in zip(states_of(training), contents, strict=False):
            part.load_state_dict(content)
        half = slice(STEPS // 2, None) if state else slice(STEPS // 2)
        train_steps(training, batches(name)[half])
        states.append(collect(training))
    dist.destroy_process_group()
    return states


def saved(state: tuple) -> bytes:
    """Save a state to bytes, because a process takes only so many tensors as arguments."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@cache
def saved_on_two_ranks(
    name: str = "transformer", optimizer: str = "adamw", library: bool = False
) -> dict[str, tuple]:
    """Return each level's state after two of four steps."""
    cases = [(level, library, None) for level in BY_HAND]
    states = run_on_ranks(2, resumed, cases, name, optimizer)[0]
    return dict(zip(BY_HAND, states, strict=True))


def resumed_alone(state: tuple, name: str, optimizer: str) -> dict:
    model, (optimizer_class, options) = build(name), OPTIMIZERS[optimizer]
    plain = optimizer_class(model.parameters(), **options)
    model.load_state_dict(state[0])
    plain.load_state_dict(copy.deepcopy(state[1]))  # torch would go on in the same tensors
    for inputs, labels in batches(name)[STEPS // 2 :]:
        plain.zero_grad()
        loss_of(model, inputs, labels, int((labels >= 0).sum())).backward()
        plain.step()
    return model.state_dict()


@pytest.mark.parametrize(("name", "optimizer"), [("transformer", "adamw"), ("odd", "nadam")])
def test_shard_a_run_saved_on_two_ranks_goes_on_on_three_and_in_a_plain_process(name, optimizer):
    """NAdam keeps other scalars than a step, and the odd model has a scalar parameter, whose
    momentum looks like a step."""
    expected = one_process(name, optimizer)
    states = saved_on_two_ranks(name, optimizer)
    cases = [(level, False, saved(state)) for level, state in states.items()]
    three_ranks = run_on_ranks(3, resumed, cases, name, optimizer)[0]
    for state, (weights, _) in zip(states.values(), three_ranks, strict=True):
        weights_when_saved, _ = state
        assert largest_difference(weights_when_saved, expected) > 1e-3, "the control"
        assert largest_difference(weights, expected) < 1e-10
        assert largest_difference(resumed_alone(state, name, optimizer), expected) < 1e-10


def held_when_resumed(rank: int, state: bytes, changes: tuple) -> dict[str, int]:
    """Bytes of the optimizer's state."""
    join("gloo")
    held = {}
    for level in BY_HAND:
        training = changed_levels(changes).by_hand(level, build("transformer"), AdamW, lr=0.01)
        contents = torch.load(io.BytesIO(state), weights_only=True)
        for part, content in zip(states_of(training), contents, strict=True):
            part.load_state_dict(content)
        held[level] = held_by_kind(training)["optimizer state"]
    dist.destroy_process_group()
    return held


def test_shard_a_resumed_rank_holds_only_its_part_of_the_state():
    """The control: a part that is no copy keeps all of its tensor alive."""
    state = saved_on_two_ranks()[ZERO_1]
    full_size = sum(value.nbytes for row in state[1]["state"].values() for value in row.values())
    for held in run_on_ranks(2, held_when_resumed, saved(state), ()):
        assert held == dict.fromkeys(BY_HAND, pytest.approx(full_size / 2, rel=0.02))
    no_copy = ("full_state.py", "[owned_slice].clone()", "[owned_slice]")
    for held in run_on_ranks(2, held_when_resumed, saved(state), (no_copy,)):
        assert min(held.values()) >= full_size


def test_shard_the_library_reaches_the_same_weights_and_shares_its_checkpoints():
    """Saved by hand, resumed by PyTorch's classes, and the other way round."""
    cases = [
        (level, not library, saved(state))
        for library in (False, True)
        for level, state in saved_on_two_ranks(library=library).items()
    ]
    for weights, _ in run_on_ranks(2, resumed, cases)[0]:
        assert largest_difference(weights, one_process("transformer", "adamw")) < 1e-10
