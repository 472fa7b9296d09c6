"""Each rank takes its own GPU, tells torch so before the ranks meet, and puts all tensors there.

Rehearsed on machines that only seem to have GPUs (rehearsal.py), where each script runs whole.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from common.models import Net
from helpers.train_stage import load_stage
from rehearsal import (
    AMP,
    BY_HAND,
    CONVERTED,
    DDP,
    EXAMPLES,
    MINIMAL,
    OWN_LOOP,
    SHARD,
    SINGLE,
    SURVIVE,
    RankLog,
    rehearse,
)

JOINS = {  # how the ranks of each script join, and then each names its GPU
    BY_HAND: "join nccl",
    DDP: "join nccl, device_id {}",
    AMP: "join nccl, device_id {}",
    SURVIVE: "join cpu:gloo,cuda:nccl, device_id {}",
    OWN_LOOP: "join cpu:gloo,cuda:nccl, device_id {}",
    SHARD: "join nccl, device_id {}",
    **dict.fromkeys((CONVERTED, *EXAMPLES), "join nccl"),
}


def assert_own_gpus(seen: list[RankLog], numbers: list[int], join: str = JOINS[DDP]) -> None:
    """Rank k uses the GPU numbers[k] alone, and has set it before it joins."""
    for rank, number in zip(seen, numbers, strict=True):
        assert rank.error == ""
        assert rank.devices == [number]
        assert rank.calls[0] == f"set_device {number}"
        assert rank.calls[-1] == join.format(number)


def with_local_ranks(*numbers: int) -> list[dict[str, str]]:
    """What launchers on several machines say to the ranks: each machine counts from 0."""
    return [{"LOCAL_RANK": str(number)} for number in numbers]


@pytest.mark.parametrize("script", JOINS)
def test_each_rank_uses_its_own_gpu_and_says_so_before_it_joins(script):
    seen = rehearse(script, gpus=2)
    assert_own_gpus(seen, [0, 1], JOINS[script])
    assert "epoch" in seen[0].output or "ends after step" in seen[0].output, "it has trained"


def test_the_smallest_script_uses_the_gpu_of_its_local_rank():
    assert [rank.devices for rank in rehearse(MINIMAL, gpus=2)] == [[0], [1]]


def test_the_script_for_one_gpu_uses_gpu_0_and_joins_nothing():
    [log] = rehearse(SINGLE, gpus=2, ranks=1)
    assert (log.error, log.devices, log.calls) == ("", [0], [])


LINES_OF_DDP = {
    "set": "    torch.cuda.set_device(device)\n",
    "join": "    dist.init_process_group(args.backend, device_id=device if args.backend",
    "number": 'int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()',
    "id": 'device_id=device if args.backend == "nccl" else None',
}
MISTAKES = {
    "no set_device": ((LINES_OF_DDP["set"], ""),),
    "set_device too late": (
        (LINES_OF_DDP["set"], ""),
        ("    return device\n", LINES_OF_DDP["set"] + "    return device\n"),
    ),
    "every rank on GPU 0": ((LINES_OF_DDP["number"], "0"),),
    "no device_id": ((LINES_OF_DDP["id"], ""),),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_rehearsal_sees_when_a_rank_takes_another_gpu(mistake):
    """The controls of the test above."""
    seen = rehearse(DDP, gpus=2, changes=MISTAKES[mistake])
    with pytest.raises(AssertionError):
        assert_own_gpus(seen, [0, 1])


def test_on_uneven_machines_the_gpu_follows_the_local_rank():
    """One rank on the first machine, two on the second. The control takes the rank."""
    machines = {"gpus": 2, "ranks": 3, "envs": with_local_ranks(0, 0, 1)}
    assert_own_gpus(rehearse(DDP, **machines), [0, 0, 1])
    by_rank = (('["LOCAL_RANK"])', '["RANK"])'),)
    seen = rehearse(DDP, **machines, changes=by_rank)
    with pytest.raises(AssertionError):
        assert_own_gpus(seen, [0, 0, 1])


SHOWN_ITS_OWN = [
    {"LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": f"GPU-{rank}"} for rank in range(2)
]


@pytest.mark.parametrize("script", [DDP, AMP, SURVIVE, OWN_LOOP, SHARD])
def test_a_rank_that_is_shown_only_its_own_gpu_finds_it_at_number_0(script):
    """As srun --gpus-per-task=1 does."""
    assert_own_gpus(rehearse(script, gpus=1, envs=SHOWN_ITS_OWN), [0, 0], JOINS[script])


def test_a_rank_that_forgets_that_the_numbers_begin_again_is_seen():
    """The control of the test above."""
    forgets = ((" % torch.cuda.device_count()", ""),)
    seen = rehearse(DDP, gpus=1, envs=SHOWN_ITS_OWN, changes=forgets)
    with pytest.raises(AssertionError):
        assert_own_gpus(seen, [0, 0])


def test_on_eight_gpus_the_last_local_rank_takes_the_last():
    seen = rehearse(DDP, gpus=8, envs=with_local_ranks(3, 7))
    assert_own_gpus(seen, [3, 7])


@pytest.mark.parametrize(
    ("script", "flags"),
    [*((each, ("--backend=gloo",)) for each in (BY_HAND, DDP, AMP, SHARD)), (SURVIVE, ())],
)
def test_two_ranks_share_one_gpu_over_gloo(script, flags):
    """survive sees by itself that they share it; the others are told."""
    seen = rehearse(script, *flags, gpus=1)
    assert_own_gpus(seen, [0, 0], "join gloo")
    assert ("2 ranks share 1 GPUs: gloo, not nccl" in seen[0].output) == (script == SURVIVE)


REFUSES = (
    '    raise dist.DistBackendError("NCCL error: Duplicate GPU detected : rank 0 and rank 1")\n'
)


@pytest.mark.parametrize("script", [DDP, AMP, SHARD])
def test_two_ranks_that_share_a_gpu_over_nccl_end_in_one_line(script):
    """nccl refuses while they join. survive does not get so far: it takes gloo by itself."""
    changes = ((LINES_OF_DDP["join"], REFUSES + LINES_OF_DDP["join"]),)
    seen = rehearse(script, gpus=1, changes=changes)
    assert [rank.error for rank in seen] == ["exit status 2"] * 2


@pytest.mark.parametrize("key", ["01", "02", "03", "04", "05", "survive"])
def test_evaluation_sends_each_batch_to_the_gpu(key):
    """On tensors without data, which refuse to meet on two devices. The control sends nothing."""
    send = ("train.py", "images, labels = images.to(device), labels.to(device)")
    silent = dict.fromkeys(("broadcast", "all_reduce"), lambda tensor, **_: None)
    # With all tensors on the GPU, it gets as far as reading its totals, which have no data here.
    for without, end in (((), DataDependentOutputException), ((send,), RuntimeError)):
        evaluate = load_stage(key, without).evaluate
        with FakeTensorMode(), patch.multiple(dist, **silent):
            with torch.device("cuda:0"):
                model = Net(channels=1, image_size=28, classes=10, batch_norm=True)
            batch = torch.empty(4, 1, 28, 28), torch.empty(4, dtype=torch.int64)
            with pytest.raises(end) as raised:
                evaluate(model, [batch], torch.device("cuda:0"))
        assert raised.type is end
