"""beyond/shard: what cannot be divided, and a wrong call, are refused in one line on every rank."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adafactor
from torch.utils.checkpoint import CheckpointError, checkpoint

import fsdp
import zero
from helpers.on_ranks import gather_from_ranks, on_ranks
from helpers.refusals import assert_one_line, refusal
from shard_cases import FSDP, ZERO_1, ZERO_2, changed_levels

REFUSED_FLAGS = {
    "--width=30": "--width 30 is no multiple of 4",
    "--model=net": "--model net does not go with --dataset text",
    "--shard=all": "invalid choice: 'all'",
    "--clip-norm=0": "--clip-norm: got '0'",
    "--batch-size=33": "--batch-size 33 does not divide by 2: try 34",
    "--batch-size=99998": "--batch-size 99998 is more than the",
}


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_shard_a_wrong_call_ends_in_one_line(flag):
    assert_one_line(refusal("shard", flag, world_size=2), REFUSED_FLAGS[flag])


class Tied(nn.Module):
    """The usual tie of a language model, across two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def untied() -> nn.Module:
    model = Tied()
    model.head = nn.Linear(3, 5)
    return model


def mixed() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5).double()))


def backward_once(level: str, model: nn.Module, optimizer_class: type) -> None:
    training = changed_levels().by_hand(level, model, optimizer_class, lr=0.1)
    training.model(torch.arange(5)).sum().backward()
    training.finish()


REFUSED_MODELS = [  # the level, the model, the optimizer, and what the line says
    (FSDP, Tied, SGD, "embedding.weight and head.weight are one"),
    (ZERO_1, Tied, Adafactor, "Adafactor looks at whole parameters"),
    (FSDP, untied, type("Mine", (Adafactor,), {}), "Mine looks at whole parameters"),
    (FSDP, lambda: nn.Linear(3, 2), SGD, "Linear has no child with trained parameters: nothing to"),
    (FSDP, mixed, SGD, "0 has parameters in torch.float32 and torch.float64: convert"),
    (FSDP, untied, SGD, "gave no gradient to unused.weight, unused.bias on"),
    (ZERO_2, Tied, SGD, "gave no gradient to parameter 1 of shape (3, 3), parameter 2"),
]


@on_ranks(2)
def test_shard_what_cannot_be_divided_is_refused_in_one_line_on_every_rank(rank):
    for level, model, optimizer_class, words in REFUSED_MODELS:
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            backward_once(level, model(), optimizer_class)
        assert caught.typename == "ShardingError"
        line, line_of_the_other = gather_from_ranks(str(caught.value))
        assert line == line_of_the_other
        assert "\n" not in line


class ScaleUsedByOneRank(nn.Module):
    """A parameter outside of all layers, of which only rank 0 has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        hidden = self.layer(inputs)
        return hidden * self.scale if dist.get_rank() == 0 else hidden


@on_ranks(2)
def test_shard_a_parameter_that_one_rank_alone_uses_is_refused_at_once_on_every_rank(rank):
    """Every rank comes to the end of finish(): nobody is left waiting, so both can go on."""
    cases = [
        (FSDP, "scale"),
        (ZERO_2, "parameter 0 of shape (3,)"),
    ]
    for level, name in cases:
        training = changed_levels().by_hand(level, ScaleUsedByOneRank(), SGD, lr=0.1)
        training.model(torch.ones(2, 3)).sum().backward()
        words = f"gave no gradient to {name} on at least one rank: freeze"
        with pytest.raises(ValueError, match=re.escape(words)):
            training.finish()
        assert gather_from_ranks(rank) == [0, 1]


class ComputedAgain(nn.Module):
    def __init__(self, computes_again: bool) -> None:
        super().__init__()
        self.layer, self.computes_again = nn.Linear(3, 3), computes_again

    def forward(self, inputs):
        if self.computes_again:
            return checkpoint(self.layer, inputs, use_reentrant=False)
        return self.layer(inputs)


@on_ranks(2)
def test_shard_a_checkpoint_inside_a_layer_ends_with_torchs_error_about_sizes(rank):
    for computes_again in (False, True):
        model = fsdp.FSDP(nn.Sequential(ComputedAgain(computes_again)))
        loss = model(torch.ones(4, 3, requires_grad=True)).sum()
        with pytest.raises(CheckpointError, match="metadata") if computes_again else nullcontext():
            loss.backward()


@on_ranks(2)
def test_shard_zero_2_takes_one_backward_before_finish_and_no_step_before_it(rank):
    model = nn.Linear(3, 2)
    optimizer = zero.ShardedGradients(model.parameters(), SGD, lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"step\(\) before finish\(\): call finish"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"a second backward before finish\(\): call finish"):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.finish()
    optimizer.zero_grad()
    for _ in range(2):  # the control: with finish() after each, gradients add up
        model(torch.ones(1, 3)).sum().backward()
        optimizer.finish()
    optimizer.give_gradients()
    assert {g for own in optimizer.owned.values() for g in own.grad.tolist()} == {2.0}
