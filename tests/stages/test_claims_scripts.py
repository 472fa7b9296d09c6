"""Claims about published scripts and their habits: C05, C25, C28, C38."""

import argparse
import builtins
import io
import traceback
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from helpers.on_ranks import on_ranks


def test_c05_type_bool_takes_any_text_for_true():
    parser = argparse.ArgumentParser()
    parser.add_argument("--multi_gpu", type=bool)
    parser.add_argument("--multi-gpu", action=argparse.BooleanOptionalAction, dest="right")
    for text, value in (("False", True), ("0", True), ("", False)):
        assert parser.parse_args(["--multi_gpu", text]).multi_gpu is value
    for flag, value in (("--multi-gpu", True), ("--no-multi-gpu", False)):
        assert parser.parse_args([flag]).right is value


@on_ranks(2)
def test_c25_three_lines_of_the_published_script_are_refused_and_their_cures_are_not(rank):
    with pytest.raises(ValueError, match=r"positive integer value, but got batch_size=64\.0"):
        DataLoader(range(256), batch_size=128 / float(2))
    assert len(next(iter(DataLoader(range(256), batch_size=128 // 2)))) == 64
    with pytest.raises(AttributeError, match="'int' object has no attribute 'allreduce'"):
        dist.all_reduce(torch.ones(1), group=0)
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    loss = nn.Linear(3, 1)(torch.ones(3)).sum()
    with pytest.raises(IndexError, match=r"Use `tensor\.item\(\)`"):
        loss.data[0]
    assert isinstance(loss.item(), float)


@on_ranks(2)
def test_c28_the_published_guard_is_false_for_every_parameter(rank):
    guards = (lambda p: type(p) is torch.Tensor, lambda p: isinstance(p, torch.Tensor))
    for guard, passed, expected in zip(guards, (0, 12), (1.0 + rank, 1.5), strict=True):
        model = nn.Linear(3, 2)
        others = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 2), nn.LSTM(2, 2)
        parameters = list(nn.ModuleList([model, *others]).parameters())
        assert (len(parameters), sum(map(guard, parameters))) == (12, passed)
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        for parameter in filter(guard, model.parameters()):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        assert model.weight.grad.unique().tolist() == [expected]


@pytest.mark.parametrize("is_rank_0", [False, True])
def test_c38_a_muted_rank_hides_its_tracebacks_and_files(is_rank_0):
    with pytest.raises(TypeError, match="force"):
        print("where print is not replaced", force=True)
    original, out = builtins.print, io.StringIO()

    def quiet_print(*args, force=False, **kwargs):
        if is_rank_0 or force:
            original(*args, **kwargs)

    with patch.object(builtins, "print", quiet_print):
        print("heard", file=out)
        print("forced", file=out, force=True)
        try:
            raise RuntimeError("the reason")
        except RuntimeError:
            traceback.print_exc(file=out)  # the standard library prints it with print
    lines = out.getvalue().splitlines()
    assert (lines[0] == "heard", "forced" in lines) == (is_rank_0, True)
    assert ("RuntimeError: the reason" in lines) == is_rank_0
