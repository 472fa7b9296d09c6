"""Ranks that torchrun, srun or nobody has started do the same. Real torchruns: test_cluster.py."""

import pytest
import torch
import torch.distributed as dist
from support import ROOT, Run, command, free_port, load_stage, train_once
from test_bad_input import SHORT

SCRIPTS = {"04": "04_ddp_torchrun/train.py", "05": "05_amp_syncbn/train.py"}
each_key = pytest.mark.parametrize("key", SCRIPTS)


def srun(ranks: int, tasks: str) -> dict[str, str]:
    """SLURM's own names for rank, local rank, world size and ranks on this node."""
    env = {"SLURM_PROCID": "{RANK}", "SLURM_LOCALID": "{RANK}", "SLURM_STEP_NUM_TASKS": str(ranks)}
    return env | {"SLURM_STEP_TASKS_PER_NODE": tasks}


STARTS = [
    ("04", 2, 2, srun(2, "2")),
    ("05", 2, 2, srun(2, "2(x3),1")),
    ("04", 1, 1, srun(1, "1")),
    ("04", 1, 1, {}),
    ("05", 1, 1, {}),
    ("03", 2, 1, {}),  # starts its own processes
]


@pytest.mark.parametrize(("key", "ranks", "processes", "env"), STARTS)
def test_whoever_starts_the_ranks_their_losses_are_the_same(key, ranks, processes, env, tmp_path):
    if processes > 1:
        env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = SCRIPTS.get(key, "03_ddp_manual_allreduce/train.py")
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path}", f"--data-dir={ROOT / 'data'}")
    answers = command(script, *flags, ranks=processes, env=env)
    assert [status for status, _ in answers] == [0] * processes, answers
    assert f"global batch 60 = {ranks} × {60 // ranks}\n" in answers[0][1]
    assert "epoch" not in "".join(output for _, output in answers[1:]), "only rank 0 prints"
    same = train_once(key, ranks, *SHORT, dtype=torch.float32)
    assert torch.equal(Run(tmp_path, [], "").losses, same.losses)


@each_key
def test_torchrun_comes_before_srun_which_needs_an_address(key, monkeypatch):
    """A torchrun that srun has started: both have set their variables."""
    told = "error: MASTER_ADDR is not set: start with torchrun, or export it\n"
    assert command(SCRIPTS[key], env=srun(2, "1(x2)")) == [(2, told)]
    stage = load_stage(key)
    for name, value in zip(stage.SRUN, ("7", "3", "16", "4(x4)"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert stage.read_launcher() == [7, 3, 16, 4]
    for name, value in zip(stage.TORCHRUN, "1152", strict=True):
        monkeypatch.setenv(name, value)
    assert stage.read_launcher() == [1, 1, 5, 2]


@pytest.mark.parametrize("key", ["03", "04", "05"])
def test_one_rank_repeats_01_with_dropout_too(key):
    flags = ("--model=net", "--epochs=2", "--batch-size=60")
    one, other = (train_once(k, 1, *flags) for k in ("01", key))
    assert ((one.losses - other.losses).abs().max() < 1e-10) == (key != "03")


@each_key
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("device", "gpus"), [("cuda:0", 2), ("cpu", 2), ("cpu", 0)])
def test_nccl_is_for_ranks_that_have_a_gpu_each(key, ranks, device, gpus, monkeypatch, capsys):
    asked, device = {}, torch.device(device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **more: asked.update(more, name=a))
    load_stage(key).init_distributed(device, 0, ranks, ranks)
    nccl = device.type == "cuda" and ranks <= gpus
    assert (asked["name"], asked["device_id"]) == (
        (("nccl",), device) if nccl else (("gloo",), None)
    )
    assert (asked["rank"], asked["world_size"]) == (0, ranks)
    assert isinstance(asked["store"], dist.HashStore) if ranks == 1 else asked["store"] is None
    shared = "3 ranks share 2 GPUs: gloo, not nccl\n"
    assert capsys.readouterr().out == shared * (device.type == "cuda" and not nccl)
