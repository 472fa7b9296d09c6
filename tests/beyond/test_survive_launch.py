"""launch.py: a rank takes its numbers from torchrun or srun, and all ranks choose one backend."""

import os
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import launch
from helpers.on_ranks import gather_from_ranks, on_ranks
from helpers.refusals import assert_one_line, refusal
from local_ranks.scripts import launcher_variables


def answer_of(function, *args: object) -> str:
    """What a call returns, or the line of its error."""
    try:
        return str(function(*args))
    except launch.LaunchError as error:
        return str(error)


START = "expected a whole number: start with torchrun or srun"
LAUNCHERS = {  # the variables of torchrun and those of srun; what the rank then knows
    "srun": ("", "5 1 8 4(x2)", "[5, 1, 8, 4]"),
    "torchrun in srun": ("1 1 2 2", "5 1 8 4(x2)", "[1, 1, 2, 2]"),
    "a torchrun in each of two tasks": ("0 0 1 1", "1 1 2 2", "[0, 0, 1, 1]"),
    "a rank that is not there": ("2 1 2 2", "", "RANK is 2, expected less than 2"),
    "no number": ("1 one 2 2", "", f"LOCAL_RANK is one, {START}"),
    "a number and more": ("1 1 2x 2", "", f"WORLD_SIZE is 2x, {START}"),
    "RANK alone": ("1", "", f"LOCAL_RANK is not set, {START}"),
    "half of torchrun in srun": ("1 1 2", "5 1 8 4", f"LOCAL_WORLD_SIZE is not set, {START}"),
    "srun without a number": ("", "1 1 2 two", f"SLURM_STEP_TASKS_PER_NODE is two, {START}"),
}


@pytest.mark.parametrize("case", LAUNCHERS)
def test_the_launcher_is_torchrun_or_srun_or_nobody(case):
    torchrun, srun, expected = LAUNCHERS[case]
    env = dict(zip(launch.TORCHRUN, torchrun.split(), strict=False))
    env |= dict(zip(launch.SRUN, srun.split(), strict=False))
    with patch.object(os, "environ", env):
        assert answer_of(launch.read_launcher) == expected


WRONG_STARTS = [
    ({"RANK": "1"}, f"LOCAL_RANK is not set, {START}"),
    (launcher_variables("soon"), "MASTER_PORT is soon, expected a whole number: export MASTER_P"),
    (launcher_variables(0), "MASTER_PORT is 0, expected a free port on rank 0's host"),
    (launcher_variables(2**16), "MASTER_PORT is 65536, expected a free port on rank 0's host"),
]


for host in ("127.0.0.1:29500", "node..example"):  # no name server is asked about these
    error = f"MASTER_ADDR is {host}, which this machine cannot resolve ("
    WRONG_STARTS.append((launcher_variables(29500) | {"MASTER_ADDR": host}, error))


@pytest.mark.parametrize(("env", "error"), WRONG_STARTS)
def test_wrong_launch_variables_end_in_one_line_and_nobody_trains_alone(env, error):
    assert_one_line(refusal("survive", env=env), f"error: {error}")


def gpu_with(uuid: str):
    """A machine whose GPU has this uuid: torch's questions are answered, no GPU is used."""
    gpu = SimpleNamespace(uuid=uuid)
    return patch.multiple(torch.cuda, set_device=id, get_device_properties=lambda _: gpu)


@on_ranks(3)
def test_restarted_ranks_find_nothing_of_those_before_and_tell_their_gpus_apart(rank):
    """The uuid tells: srun may show each rank one GPU only. The control: no prefix in the store."""
    limit, lines = timedelta(seconds=30), []
    for prefix in (True, False):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        launch.open_store(rank, 3, limit, one_machine=prefix).set("address", "old")
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        store = launch.open_store(rank, 3, limit, one_machine=prefix)
        assert store.check(["address"]) != prefix
    for gpus in (2, 3):
        here = dist.PrefixStore(str(gpus), store)
        with (
            gpu_with(f"GPU-{rank % gpus}"),
            patch.object(launch, "print", lines.append, create=True),
        ):
            assert launch.each_rank_has_a_gpu(here, torch.device("cuda", 0), rank, 3) == (gpus == 3)
    assert lines == ["3 ranks share 2 GPUs: gloo, not nccl"] * (rank == 0)


NO_GPU = "1 of 3 ranks have no GPU (rank 1), the others have: give all nodes GPUs, or all ranks"
MACHINES = [  # the GPU of each rank; whether each has its own, as nccl needs it
    (("A", "B", "C"), "True"),
    (("A", "B", "B"), "False"),
    (("A", "", "B"), f"{NO_GPU} --device cpu"),
    (("", "", ""), "False"),
]


@on_ranks(3)
def test_all_ranks_choose_the_same_backend_though_their_machines_differ(rank):
    """Each by itself would choose otherwise in the second and third case."""
    for number, (gpus, expected) in enumerate(MACHINES):
        device = torch.device("cuda", 0) if gpus[rank] else torch.device("cpu")
        store = dist.PrefixStore(f"case {number}", dist.distributed_c10d._get_default_store())
        with gpu_with(gpus[rank]), patch.object(launch, "print", id, create=True):
            answer = answer_of(launch.each_rank_has_a_gpu, store, device, rank, 3)
        assert gather_from_ranks(answer) == [expected] * 3
