"""Whoever starts the ranks, they do the same, and torchrun tells each of them who it is.

Which GPU each takes: test_devices.py.
Real torchruns: test_launch_scripts.py. A real SLURM: test_two_nodes.py.
"""

import pytest
import torch

from helpers.machine import free_port
from helpers.refusals import SCRIPTS
from helpers.small_data import few_digits
from local_ranks.run_files import Run
from local_ranks.scripts import launcher_variables, run_script
from local_ranks.train_stage import ONE_EPOCH, train_once
from markers import fences


def srun(ranks: int, tasks: str) -> dict[str, str]:
    """SLURM's own names for rank, local rank, world size and ranks on this node."""
    env = {"SLURM_PROCID": "{RANK}", "SLURM_LOCALID": "{RANK}", "SLURM_STEP_NUM_TASKS": str(ranks)}
    return env | {"SLURM_STEP_TASKS_PER_NODE": tasks}


STARTS = [  # script, ranks, processes that are started here, what a launcher tells them
    ("04", 2, 2, launcher_variables(0)),
    ("04", 1, 1, launcher_variables(0, world_size=1)),
    ("survive", 2, 2, srun(2, "2(x3),1")),
    ("survive", 1, 1, {}),
    ("03", 2, 1, {}),  # starts its own processes
]


@pytest.mark.parametrize(("key", "ranks", "processes", "env"), STARTS)
def test_whoever_starts_the_ranks_their_losses_are_the_same(key, ranks, processes, env, tmp_path):
    env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    five_steps = (*few_digits(), *ONE_EPOCH)
    flags = (*five_steps, "--device=cpu", f"--run-dir={tmp_path}")
    answers = run_script(SCRIPTS[key], *flags, processes=processes, env=env)
    assert [status for status, _ in answers] == [0] * processes, answers
    assert f"global batch 60 = {ranks} × {60 // ranks}\n" in answers[0][1]
    assert "epoch" not in "".join(output for _, output in answers[1:]), "only rank 0 prints"
    same = train_once(key, ranks, *five_steps, dtype=torch.float32)
    assert torch.equal(Run(tmp_path, [], "").losses, same.losses)


def test_c01_c03_rank_variables_shows_what_nodes_of_unequal_size_are_given():
    """The page says so of two real torchruns, which test_readmes.py starts. On the second node,
    rank % GPUs is another GPU."""
    command = "python 04_ddp_torchrun/launch/rank_variables.py --nodes 3 2"
    [shown] = [fence.text for fence in fences("text") if fence.command == command]
    table, *_ = shown.split("\n\n")
    node_0, node_1 = table.split("node 1")
    for output, numbers in (
        (node_0, ("RANK 0 1 2", "LOCAL_RANK 0 1 2", "rank % 3 0 1 2 the local rank")),
        (node_1, ("RANK 3 4", "LOCAL_RANK 0 1", "rank % 2 1 0 another GPU than LOCAL_RANK names")),
    ):
        lines = [" ".join(line.split()) for line in output.splitlines()[1:]]
        assert lines == [*numbers, f"WORLD_SIZE 5, LOCAL_WORLD_SIZE {len(numbers[0].split()) - 1}"]
