"""On the roads too, each rank takes its own GPU and puts all tensors there.

Rehearsed on machines that only seem to have GPUs (helpers/rehearsal.py). The controls, scripts that
take another GPU: stages/test_devices.py.
"""

import pytest

from helpers.own_gpus import (
    assert_evaluation_sends_each_batch_to_the_gpu,
    assert_finds_the_gpu_that_it_is_shown,
    assert_nccl_refuses_a_shared_gpu,
    assert_trains_on_own_gpus,
    assert_two_ranks_share_a_gpu,
)
from helpers.rehearsal import CONVERTED, EXAMPLES, OWN_LOOP, SHARD, SURVIVE, rehearse


@pytest.mark.parametrize("script", [SURVIVE, OWN_LOOP, SHARD, CONVERTED, *EXAMPLES])
def test_each_rank_of_a_road_uses_its_own_gpu_and_says_so_before_it_joins(script):
    assert_trains_on_own_gpus(script)


@pytest.mark.parametrize("script", [SURVIVE, OWN_LOOP, SHARD])
def test_a_rank_of_a_road_that_is_shown_only_its_own_gpu_finds_it_at_number_0(script):
    assert_finds_the_gpu_that_it_is_shown(script)


@pytest.mark.parametrize(("script", "flags"), [(SHARD, ("--backend=gloo",)), (SURVIVE, ())])
def test_two_ranks_of_a_road_share_one_gpu_over_gloo(script, flags):
    assert_two_ranks_share_a_gpu(script, *flags)


def test_shard_two_ranks_that_share_a_gpu_over_nccl_end_in_one_line():
    assert_nccl_refuses_a_shared_gpu(SHARD)


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_shard_torchs_fsdp_over_gloo_on_a_gpu_is_refused_because_torch_crashes(level):
    ranks = rehearse(SHARD, "--library", "--backend=gloo", f"--shard={level}", gpus=1)
    assert [rank.error for rank in ranks] == ["exit status 2"] * 2
    assert not any(rank.calls for rank in ranks), "before they join"


def test_survive_evaluation_sends_each_batch_to_the_gpu():
    assert_evaluation_sends_each_batch_to_the_gpu("survive")
