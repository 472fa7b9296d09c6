"""Each rank takes its own GPU, tells torch so before the ranks meet, and puts all tensors there.

Rehearsed on machines that only seem to have GPUs (helpers/rehearsal.py), where each script runs
whole. Those of the roads: beyond/test_beyond_devices.py.
"""

import pytest

from helpers.own_gpus import (
    SHOWN_ITS_OWN,
    assert_evaluation_sends_each_batch_to_the_gpu,
    assert_finds_the_gpu_that_it_is_shown,
    assert_nccl_refuses_a_shared_gpu,
    assert_own_gpus,
    assert_trains_on_own_gpus,
    assert_two_ranks_share_a_gpu,
    lines_never_run,
    lines_not_for_gpus,
)
from helpers.rehearsal import (
    AMP,
    BY_HAND,
    DDP,
    MINIMAL,
    MINIMAL_SINGLE,
    REPLICAS,
    SINGLE,
    RankLog,
    rehearse,
)
from local_ranks.chapters import ROOT


def with_local_ranks(*numbers: int) -> list[dict[str, str]]:
    """What launchers on several machines say to the ranks: each machine counts from 0."""
    return [{"LOCAL_RANK": str(number)} for number in numbers]


@pytest.mark.parametrize("script", [BY_HAND, DDP, AMP])
def test_each_rank_uses_its_own_gpu_and_says_so_before_it_joins(script):
    assert_trains_on_own_gpus(script)


def test_the_smallest_script_uses_the_gpu_of_its_local_rank():
    assert [rank.devices for rank in rehearse(MINIMAL, gpus=2)] == [[0], [1]]


def test_the_script_for_one_gpu_uses_gpu_0_and_joins_nothing():
    for script in (SINGLE, MINIMAL_SINGLE):
        [log] = rehearse(script, gpus=2)
        assert (log.error, log.devices, log.calls) == ("", [0], [])


def assert_trains_replicas(log: RankLog, calls: set[str]) -> None:
    """The whole batch goes to GPU 0, and no other GPU gets tensors but from DataParallel."""
    assert (log.error, log.devices, {*log.calls}) == ("", [0], calls)
    assert "epoch 1/2" in log.output, "it has trained"


PLACES = [  # GPUs, flags, and where 02 puts its replicas
    (2, (), "replicas on GPUs [0, 1]"),
    (3, ("--replicas=2",), "replicas on GPUs [0, 1]"),
    (2, ("--replicas=3",), "set_device 0"),  # all on the first GPU
    (1, (), "set_device 0"),
]


@pytest.mark.parametrize(("gpus", "flags", "place"), PLACES)
def test_02_asks_for_a_replica_on_each_gpu_if_they_are_enough_and_seeds_each_gpu(
    gpus, flags, place
):
    [log] = rehearse(REPLICAS, *flags, gpus=gpus)
    assert_trains_replicas(
        log, {place, *(f"seed {1234 + gpu} on GPU {gpu}" for gpu in range(gpus))}
    )


@pytest.mark.parametrize(
    "mistake", [("device(gpu)", "device(0)"), (" * gpus + gpu", ""), ("range(replicas)", "[0]")]
)
def test_a_rehearsal_sees_when_02_forgets_a_gpu(mistake):
    """The control of the test above."""
    [log] = rehearse(REPLICAS, gpus=2, changes=(mistake,))
    calls = {"replicas on GPUs [0, 1]", "seed 1234 on GPU 0", "seed 1235 on GPU 1"}
    with pytest.raises(AssertionError):
        assert_trains_replicas(log, calls)


LINES_OF_DDP = {
    "set": "    torch.cuda.set_device(device)\n",
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


@pytest.mark.parametrize("script", [DDP, AMP])
def test_a_rank_that_is_shown_only_its_own_gpu_finds_it_at_number_0(script):
    assert_finds_the_gpu_that_it_is_shown(script)


def test_a_rank_that_forgets_that_the_numbers_begin_again_is_seen():
    """The control of the test above."""
    forgets = ((" % torch.cuda.device_count()", ""),)
    seen = rehearse(DDP, gpus=1, envs=SHOWN_ITS_OWN, changes=forgets)
    with pytest.raises(AssertionError):
        assert_own_gpus(seen, [0, 0])


@pytest.mark.parametrize("script", [BY_HAND, DDP, AMP])
def test_two_ranks_share_one_gpu_over_gloo(script):
    assert_two_ranks_share_a_gpu(script, "--backend=gloo")


@pytest.mark.parametrize("script", [DDP, AMP])
def test_two_ranks_that_share_a_gpu_over_nccl_end_in_one_line(script):
    assert_nccl_refuses_a_shared_gpu(script)


@pytest.mark.parametrize("key", ["01", "02", "03", "04", "05"])
def test_evaluation_sends_each_batch_to_the_gpu(key):
    assert_evaluation_sends_each_batch_to_the_gpu(key)


ON_MACHINES = dict.fromkeys((SINGLE, MINIMAL_SINGLE, BY_HAND, DDP, AMP, MINIMAL), (2,))
ON_MACHINES[REPLICAS] = (1, 2)  # GPUs: with one, 02 has another branch than with several


@pytest.mark.parametrize("script", ON_MACHINES)
def test_each_line_of_a_script_but_refusals_and_the_cpus_branch_runs_on_gpus(script):
    assert lines_never_run(script, machines=ON_MACHINES[script]) == lines_not_for_gpus(script)


def test_a_line_that_only_a_gpu_reaches_is_seen_not_to_run_without_one():
    """The control of the test above."""
    unexpected = lines_never_run(DDP, machines=(0,)) - lines_not_for_gpus(DDP)
    texts = (ROOT / DDP).read_text().splitlines()
    assert any("torch.cuda." in texts[line - 1] for line in unexpected)
