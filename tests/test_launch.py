"""Ranks that torchrun, srun or nobody has started do the same. Real torchruns: test_cluster.py."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support import ROOT, Run, command, free_port, load_stage, train_once
from test_bad_input import SCRIPTS, SHORT


def srun(ranks: int, tasks: str) -> dict[str, str]:
    """SLURM's own names for rank, local rank, world size and ranks on this node."""
    env = {"SLURM_PROCID": "{RANK}", "SLURM_LOCALID": "{RANK}", "SLURM_STEP_NUM_TASKS": str(ranks)}
    return env | {"SLURM_STEP_TASKS_PER_NODE": tasks}


STARTS = [
    ("04", 2, 2, srun(2, "2")),
    ("05", 2, 2, srun(2, "2(x3),1")),
    ("04", 1, 1, srun(1, "1")),
    ("04", 1, 1, {}),
    ("03", 2, 1, {}),  # starts its own processes
]


@pytest.mark.parametrize(("key", "ranks", "processes", "env"), STARTS)
def test_whoever_starts_the_ranks_their_losses_are_the_same(key, ranks, processes, env, tmp_path):
    if processes > 1:
        env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path}", f"--data-dir={ROOT / 'data'}")
    answers = command(SCRIPTS[key], *flags, ranks=processes, env=env)
    assert [status for status, _ in answers] == [0] * processes, answers
    assert f"global batch 60 = {ranks} × {60 // ranks}\n" in answers[0][1]
    assert "epoch" not in "".join(output for _, output in answers[1:]), "only rank 0 prints"
    same = train_once(key, ranks, *SHORT, dtype=torch.float32)
    assert torch.equal(Run(tmp_path, [], "").losses, same.losses)


@pytest.mark.parametrize(("code", "said"), [(2, 2), (-9, "process 1 terminated with SIGKILL")])
def test_03_ends_with_the_status_of_its_rank_or_says_which_signal_killed_it(code, said):
    error = mp.ProcessExitedException("process 1 terminated with SIGKILL", 1, 7, code)
    spawn = patch.object(mp, "spawn", side_effect=error)
    with spawn, patch("sys.argv", ["train.py"]), pytest.raises(SystemExit) as end:
        load_stage("03").main()
    assert end.value.code == said


def test_torchrun_comes_before_srun_which_needs_an_address():
    """A torchrun that srun has started: both have set their variables. 05 has this from 04."""
    told = "error: MASTER_ADDR is not set: start with torchrun, or export it\n"
    assert command(SCRIPTS["04"], env=srun(2, "1(x2)")) == [(2, told)]
    stage = load_stage("04")
    both = dict(zip(stage.SRUN, ("7", "3", "16", "4(x4)"), strict=True))
    both |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for ranks in ([7, 3, 16, 4], [1, 1, 5, 2]):
        with patch.dict(os.environ, both):
            assert stage.read_launcher() == ranks
        both |= dict(zip(stage.TORCHRUN, "1152", strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("device", "gpus"), [("cuda:0", 2), ("cpu", 2), ("cpu", 0)])
def test_nccl_is_for_ranks_that_have_a_gpu_each(ranks, device, gpus, monkeypatch, capsys):
    asked, device = {}, torch.device(device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **more: asked.update(more, name=a))
    load_stage("04").init_distributed(device, 0, ranks, ranks)
    nccl = device.type == "cuda" and ranks <= gpus
    assert (asked["name"], asked["device_id"]) == (
        (("nccl",), device) if nccl else (("gloo",), None)
    )
    assert (asked["rank"], asked["world_size"]) == (0, ranks)
    assert isinstance(asked["store"], dist.HashStore) if ranks == 1 else asked["store"] is None
    shared = "3 ranks share 2 GPUs: gloo, not nccl\n"
    assert capsys.readouterr().out == shared * (device.type == "cuda" and not nccl)
