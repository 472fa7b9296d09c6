"""The stages train over the package shm as they do over gloo, to the same bits."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from helpers.on_ranks import run_on_ranks
from local_ranks.chapters import ROOT
from local_ranks.train_stage import train_once, train_rank
from shm import fast
from shm.exchange import Exchange
from shm.replace import over_shm


def train_over_shm(rank, key, flags, with_sums):
    if not with_sums:
        patch.object(Exchange, "all_reduce", lambda *_: iter(())).start()
        patch.dict(fast.NUMBER_OF_DTYPE, clear=True).start()  # nor in the short way of C
    dist.init_process_group = over_shm(dist.init_process_group)
    return train_rank(rank, key, flags, torch.float32, ())[0]


@pytest.mark.parametrize("key", ["04", "05", "survive"])
@pytest.mark.parametrize("with_sums", [True, False])
def test_a_stage_trains_over_shm_to_the_bits_of_gloo(key, with_sums, tmp_path):
    """The control: nothing is added up."""
    flags = ("--model=net-bn", "--max-steps=6", "--seed=7", "--device=cpu")
    places = (f"--data-dir={ROOT / 'data'}", f"--run-dir={tmp_path}")
    over_gloo = train_once(key, 2, *flags, dtype=torch.float32).states
    over_shm = run_on_ranks(2, train_over_shm, key, (*flags, *places), with_sums)
    equal = [
        torch.equal(ours[name], theirs[name])
        for ours, theirs in zip(over_shm, over_gloo, strict=True)
        for name in ours
    ]
    assert all(equal) == with_sums
