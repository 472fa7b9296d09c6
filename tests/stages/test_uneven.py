"""One batch more on one rank makes it wait until the time limit, and Join ends such a training."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import uneven
from helpers.machine import GLOO_TIMED_OUT
from helpers.on_ranks import on_ranks
from local_ranks.train_stage import default_dtype


@on_ranks(3)
def test_join_ends_and_divides_by_the_initial_or_by_the_active_ranks(rank):
    """The gradient of rank r is r + 1. Three steps of all, and one of the last rank alone."""
    with default_dtype(torch.float64):
        for divide, last in ((True, 3 / 3), (False, 3 / 1)):
            gradients, weights = uneven.join(divide)
            assert gradients == pytest.approx([2, 2, 2] + [last] * (rank == 2), abs=1e-12)
            assert weights.tolist() == [pytest.approx([1 - 0.1 * (6 + last)] * 2, abs=1e-12)]


@on_ranks(3)
def test_one_batch_more_on_a_rank_makes_it_wait_until_the_time_limit(rank):
    done = "done after 3 of 3 steps"
    with patch.object(uneven, "batches_of", lambda *_: [torch.ones(1, 2)] * 3):
        assert uneven.hang(seconds=60) == done, "the control"
    line = uneven.hang(seconds=2).replace(GLOO_TIMED_OUT, "Timed out waiting 2000ms")
    dist.barrier()  # or the others would end before it is late
    assert line == ("step 4 of 4: Timed out waiting 2000ms" if rank == 2 else done)
