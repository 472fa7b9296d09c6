"""However the ranks are started, they do the same: torchrun, srun's variables, or no launcher."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import ROOT, Run, command, free_port, load_stage, run_ranks, torchrun, train_once

SHORT = ("--model=net-bn", "--epochs=1", "--batch-size=60")

CUT = {
    "04": "global batch {} = {} × {} (world size × local batch)",
    "05": "global batch {} = {} × 1 × {} (world size × accumulate × micro-batch)",
}


def losses(folder: Path) -> torch.Tensor:
    return Run(folder, [], "").losses


@pytest.mark.parametrize(
    ("key", "script"), [("04", "04_ddp_torchrun/train.py"), ("05", "05_amp_syncbn/train.py")]
)
def test_two_ranks_under_torchrun(key, script, tmp_path):
    """The one real launch of each; its losses are those of the ranks that the suite starts."""
    done = torchrun(2, script, *SHORT, "--device=cpu", f"--run-dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert CUT[key].format(60, 2, 30) in done.stdout
    assert done.stdout.count("epoch 1/1") == 1, "only rank 0 prints"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world_size"], summary["local_batch"]) == (2, 30)
    assert len(summary["peak_memory_bytes"]) == 2
    same = train_once(key, 2, *SHORT, dtype=torch.float32)
    assert torch.equal(losses(tmp_path), same.losses)


def test_srun_without_torchrun(tmp_path):
    """SLURM's own names for rank, local rank, world size and ranks on this node."""
    env = {
        "SLURM_PROCID": "{RANK}",
        "SLURM_LOCALID": "{RANK}",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    flags = (*SHORT, "--device=cpu", f"--run-dir={tmp_path}")
    answers = command("04_ddp_torchrun/train.py", *flags, ranks=2, env=env)
    assert [status for status, _ in answers] == [0, 0], answers
    same = train_once("04", 2, *SHORT, dtype=torch.float32)
    assert torch.equal(losses(tmp_path), same.losses)


def test_srun_without_an_address_is_refused():
    env = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    [(status, output)] = command("04_ddp_torchrun/train.py", env=env)
    assert status == 2
    assert "MASTER_PORT is not set: expected a whole number" in output


@pytest.mark.parametrize("script", ["04_ddp_torchrun/train.py", "05_amp_syncbn/train.py"])
def test_without_a_launcher_the_world_is_one_rank(script, tmp_path):
    [(status, output)] = command(script, *SHORT, "--device=cpu", f"--run-dir={tmp_path}")
    assert status == 0, output
    assert CUT[script[:2]].format(60, 1, 60) in output
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


def _backend(rank: int, gpus: int) -> tuple[str, str]:
    """The backend that stage 04 asks for, and what it prints, where GPUs are only pretended."""
    stage = load_stage("04")
    gpu = SimpleNamespace(uuid=f"GPU-{rank % gpus}")
    asked = []
    sys.argv = ["train.py"]
    with (
        patch.object(stage, "pick_device", lambda *_: torch.device("cuda", rank % gpus)),
        patch.object(torch.cuda, "set_device"),
        patch.object(torch.cuda, "get_device_properties", lambda _: gpu),
        patch.object(dist, "init_process_group", lambda backend, **_: asked.append(backend)),
        redirect_stdout(StringIO()) as output,
    ):
        stage.init_distributed(stage.parse_args())
    return asked[0], output.getvalue()


@pytest.mark.parametrize(("ranks", "gpus"), [(2, 2), (3, 2)])
def test_nccl_is_for_ranks_that_have_a_gpu_each_and_gloo_carries_what_is_on_the_cpu(ranks, gpus):
    """Told apart by their UUIDs: srun may show each rank one GPU only, and they all call it 0."""
    answers = run_ranks(ranks, _backend, gpus)
    backend = "cpu:gloo,cuda:nccl" if ranks <= gpus else "gloo"
    assert [chosen for chosen, _ in answers] == [backend] * ranks
    said = "" if ranks <= gpus else "3 ranks, 2 GPUs: gloo, not nccl\n"
    assert [printed for _, printed in answers] == [said] + [""] * (ranks - 1)
