"""beyond/shard: what cannot be divided, and a wrong call, are refused in one line on every rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from local_ranks import on_ranks, run_ranks
from refusals import ended, refused
from shard_cases import FSDP, ZERO_1, ZERO_2, Odd, changed_levels, join
from support import chapter


def test_shard_a_module_that_cannot_fill_its_weights_is_refused_on_the_meta_device():
    fsdp = chapter("shard", "fsdp")
    with torch.device("meta"):
        attention = nn.Sequential(nn.MultiheadAttention(4, 2))  # it has only _reset_parameters
        linear = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="in_proj_weight is on the meta device, and Multihead"):
        fsdp.check_parameters(attention, dict(fsdp.layers_of(attention)))
    fsdp.check_parameters(linear, dict(fsdp.layers_of(linear)))  # the control


REFUSED = {
    "--width=30": "--width 30 is no multiple of 4",
    "--model=net": "--model net does not go with --dataset text",
    "--shard=all": "invalid choice: 'all'",
    "--clip-norm=0": "--clip-norm: got '0'",
    "--batch-size=33": "--batch-size 33 does not divide by 2: try 34",
    "--batch-size=99998": "--batch-size 99998 is more than the",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_shard_a_wrong_call_ends_in_one_line(flag):
    refused(ended("shard", flag, ranks=2), REFUSED[flag])


class Tied(nn.Module):
    """The usual tie of a language model, across two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def refusals(rank: int) -> list[str]:
    join("gloo")
    levels, errors = changed_levels(), []
    untied = Tied()
    untied.head = nn.Linear(3, 5)
    mixed = nn.Sequential(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5).double()))
    with torch.device("meta"):
        unfilled = Odd()
    said_of_meta = "is on the meta device, and tied or in no layer"
    with pytest.raises(ValueError, match=said_of_meta):
        levels.by_hand(FSDP, unfilled, SGD, lr=0.1)
    optimizer = levels.by_hand(ZERO_1, Tied(), SGD, lr=0.1).optimizer
    for call in (optimizer.state_dict, partial(optimizer.load_state_dict, {})):
        with pytest.raises(ValueError, match="a rank holds only its parts"):
            call()
    cases = [(FSDP, Tied(), SGD), (ZERO_1, Tied(), torch.optim.Adafactor), (FSDP, mixed, SGD)]
    for level, model, optimizer_class in [*cases, (FSDP, untied, SGD), (ZERO_2, Tied(), SGD)]:
        try:
            training = levels.by_hand(level, model, optimizer_class, lr=0.1)
            training.model(torch.arange(5)).sum().backward()
            training.finish()
        except ValueError as error:
            errors.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    return errors


def test_shard_what_cannot_be_divided_is_refused_in_one_line_on_every_rank():
    lines, other_lines = run_ranks(2, refusals)
    assert lines == other_lines
    words = ("embedding.weight and head.weight are one", "Adafactor looks at whole parameters")
    words += ("0 has parameters in torch.float32 and torch.float64: convert",)
    words += ("gave no gradient to unused: freeze", "no gradient to 2 parameters, of shape (3,)")
    for expected, line in zip(words, lines, strict=True):
        assert line.startswith("ShardingError: ")
        assert expected in line
        assert "\n" not in line


@on_ranks(2)
def test_shard_zero_2_takes_one_backward_before_finish_and_no_step_before_it(rank):
    model, zero = nn.Linear(3, 2), chapter("shard", "zero")
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


class Scaled(nn.Linear):
    def forward(self, inputs, *, scale):
        assert scale.dtype == inputs.dtype
        return super().forward(inputs) * scale


class TakesKeyword(nn.Module):
    def __init__(self, is_called: bool = True) -> None:
        super().__init__()
        self.layer, self.is_called = Scaled(3, 2), is_called

    def forward(self, inputs):
        if not self.is_called:
            return inputs.square()
        return self.layer(inputs, scale=inputs.new_ones(()))


@on_ranks(2)
def test_shard_fsdp_casts_keywords_and_refuses_a_model_without_layers(rank):
    FSDP = chapter("shard", "fsdp").FSDP  # noqa: N806
    outputs = FSDP(TakesKeyword(), dtype=torch.bfloat16)(torch.ones(1, 3))
    assert outputs.dtype == torch.float32
    with pytest.raises(ValueError, match="Linear has no child with trained parameters: nothing to"):
        FSDP(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"forward called no layer \(layer\)"):
        FSDP(TakesKeyword(is_called=False))(torch.ones(1, 3))
