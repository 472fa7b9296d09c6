"""Ranks that torchrun, srun or nobody has started do the same."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import ROOT, Run, command, free_port, load_stage, torchrun, train_once

SHORT = ("--model=net-bn", "--epochs=1", "--batch-size=60")
SCRIPTS = {"04": "04_ddp_torchrun/train.py", "05": "05_amp_syncbn/train.py"}
each_key = pytest.mark.parametrize("key", SCRIPTS)


def losses(folder: Path) -> torch.Tensor:
    return Run(folder, [], "").losses


@each_key
def test_two_ranks_under_torchrun(key, tmp_path):
    """The one real launch of each; its losses are those of the ranks that the suite starts."""
    done = torchrun(2, SCRIPTS[key], *SHORT, "--device=cpu", f"--run-dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "global batch 60 = 2 × 30\n" in done.stdout
    assert done.stdout.count("epoch 1/1") == 1, "only rank 0 prints"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world_size"], summary["local_batch"]) == (2, 30)
    assert len(summary["peak_memory_bytes"]) == 2
    same = train_once(key, 2, *SHORT, dtype=torch.float32)
    assert torch.equal(losses(tmp_path), same.losses)


@pytest.mark.parametrize(("key", "tasks"), [("04", "2"), ("05", "2(x3),1")])
def test_srun_without_torchrun(key, tasks, tmp_path):
    """SLURM's own names for rank, local rank, world size and ranks on this node."""
    env = {
        "SLURM_PROCID": "{RANK}",
        "SLURM_LOCALID": "{RANK}",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path}")
    answers = command(SCRIPTS[key], *flags, ranks=2, env=env)
    assert [status for status, _ in answers] == [0, 0], answers
    same = train_once(key, 2, *SHORT, dtype=torch.float32)
    assert torch.equal(losses(tmp_path), same.losses)


def test_torchrun_comes_before_srun(monkeypatch):
    """A torchrun that srun has started: both have set their variables."""
    for name, value in zip(load_stage("04").SRUN, ("7", "3", "16", "4(x4)"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for key in SCRIPTS:
        assert load_stage(key).read_launcher() == [7, 3, 16, 4]
    for name, value in zip(load_stage("04").TORCHRUN, "1152", strict=True):
        monkeypatch.setenv(name, value)
    for key in SCRIPTS:
        assert load_stage(key).read_launcher() == [1, 1, 5, 2]


def test_srun_without_an_address_is_refused():
    env = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    [(status, output)] = command("04_ddp_torchrun/train.py", env=env)
    assert status == 2
    assert output == "error: MASTER_ADDR is not set: start with torchrun, or export it\n"


@each_key
def test_without_a_launcher_the_world_is_one_rank(key, tmp_path):
    [(status, output)] = command(SCRIPTS[key], *SHORT, "--device=cpu", f"--run-dir={tmp_path}")
    assert status == 0, output
    assert "global batch 60 = 1 × 60\n" in output
    one = train_once("01", 1, *SHORT, dtype=torch.float32)
    assert (losses(tmp_path) - one.losses).abs().max() < 1e-4


def test_03_starts_its_own_processes(tmp_path):
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path}", f"--data-dir={ROOT / 'data'}")
    [(status, output)] = command("03_ddp_manual_allreduce/train.py", *flags)
    assert status == 0, output
    same = train_once("03", 2, *SHORT, dtype=torch.float32)
    assert torch.equal(losses(tmp_path), same.losses)


@pytest.mark.parametrize("key", ["03", "04", "05"])
def test_one_rank_repeats_01_with_dropout_too(key):
    """The same flags on one process are the same run: order, masks, losses."""
    flags = ("--model=net", "--epochs=2", "--batch-size=60")
    one, other = (train_once(k, 1, *flags) for k in ("01", key))
    assert ((one.losses - other.losses).abs().max() < 1e-10) == (key != "03")


def test_srun_with_one_task_needs_no_address(tmp_path):
    env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    env |= {"SLURM_STEP_TASKS_PER_NODE": "1"}
    flags = (*SHORT, "--device=cpu", "--max-steps=1", f"--run-dir={tmp_path}")
    [(status, output)] = command("04_ddp_torchrun/train.py", *flags, env=env)
    assert status == 0, output


def joined(key: str, device: str, ranks: int, gpus: int) -> tuple[dict, str]:
    """What a stage asks init_process_group for, and what it prints, with pretended GPUs."""
    stage, asked = load_stage(key), {}
    with (
        patch.object(torch.cuda, "device_count", lambda: gpus),
        patch.object(
            dist, "init_process_group", lambda name, **more: asked.update(more, name=name)
        ),
        redirect_stdout(StringIO()) as output,
    ):
        stage.init_distributed(torch.device(device), 0, ranks, ranks)
    return asked, output.getvalue()


@each_key
def test_nccl_is_for_ranks_that_have_a_gpu_each(key):
    gpu = torch.device("cuda", 0)
    for ranks in (1, 2):
        asked, said = joined(key, "cuda:0", ranks=ranks, gpus=2)
        assert (asked["name"], asked["device_id"], asked["world_size"]) == ("nccl", gpu, ranks)
        assert said == ""
    asked, said = joined(key, "cuda:0", ranks=3, gpus=2)
    assert (asked["name"], asked["device_id"]) == ("gloo", None)
    assert said == "3 ranks share 2 GPUs: gloo, not nccl\n"
    asked, said = joined(key, "cpu", ranks=3, gpus=2)
    assert (asked["name"], asked["device_id"], said) == ("gloo", None, "")


@each_key
def test_a_world_of_one_opens_no_port(key):
    assert isinstance(joined(key, "cpu", ranks=1, gpus=0)[0]["store"], dist.HashStore)
    assert joined(key, "cpu", ranks=2, gpus=0)[0]["store"] is None
