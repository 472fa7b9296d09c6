"""The stages on real GPUs; where there is none, each test says so and is skipped."""

import json

import pytest
import torch
from support import Run, command, free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPUS = torch.cuda.device_count()
SHORT = ("--model=net-bn", "--epochs=5", "--device=cuda")


def start(script: str, ranks: int, folder, *flags: str) -> tuple[dict, str]:
    """Run a stage, 04 and 05 with a launcher's variables; its summary and rank 0's output."""
    env = {"RANK": "{RANK}", "LOCAL_RANK": "{RANK}", "WORLD_SIZE": str(ranks)}
    env |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port())}
    started = ranks if script[:2] in ("04", "05") else 1
    answers = command(
        script, *SHORT, *flags, f"--run-dir={folder}", ranks=started, env=env if started > 1 else {}
    )
    assert all(status == 0 for status, _ in answers), answers
    return json.loads((folder / "summary.json").read_text()), answers[0][1]


@pytest.mark.parametrize(
    ("script", "ranks", "flags"),
    [
        ("01_single_gpu/train.py", 1, ()),
        ("02_data_parallel/train.py", 1, ()),
        ("03_ddp_manual_allreduce/train.py", 2, ("--world-size=2",)),
        ("04_ddp_torchrun/train.py", 1, ()),
        ("04_ddp_torchrun/train.py", 2, ()),
        ("05_amp_syncbn/train.py", 1, ("--amp=bf16",)),
        ("05_amp_syncbn/train.py", 2, ()),
        ("05_amp_syncbn/train.py", 2, ("--amp=bf16",)),
        ("05_amp_syncbn/train.py", 2, ("--amp=fp16",)),
    ],
)
def test_a_stage_learns_on_a_gpu_and_tells_its_memory(script, ranks, flags, tmp_path):
    summary, output = start(script, ranks, tmp_path, *flags)
    assert summary["device"] == "cuda"
    assert summary["test_accuracy"] > 0.9
    assert summary["memory_source"] == "torch.cuda.max_memory_allocated"
    assert len(summary["peak_memory_bytes"]) == (max(1, GPUS) if script[:2] == "02" else ranks)
    assert all(0 < peak < 2e9 for peak in summary["peak_memory_bytes"])
    assert all(line["seconds"] > 0 for line in Run(tmp_path, [], "").metrics)
    shared = script[:2] in ("04", "05") and ranks > GPUS
    assert ("gloo, not nccl" in output) == shared


def test_05_on_two_ranks_repeats_01_on_the_gpu(tmp_path):
    start("01_single_gpu/train.py", 1, tmp_path / "one")
    start("05_amp_syncbn/train.py", 2, tmp_path / "two")
    one, two = (Run(tmp_path / name, [], "").losses[:12] for name in ("one", "two"))
    assert (one - two).abs().max() < 5e-3  # convolutions of a GPU are in TF32 by default


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_03_with_nccl(tmp_path):
    flags = (f"--world-size={GPUS}", "--backend=nccl", f"--batch-size={60 * GPUS}")
    summary, _ = start("03_ddp_manual_allreduce/train.py", GPUS, tmp_path, *flags)
    assert summary["test_accuracy"] > 0.9
