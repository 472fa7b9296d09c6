"""The stages on real GPUs; where there is none, each test says so and is skipped."""

import pytest
import torch
from torch import nn

import peak
from helpers.on_ranks import on_ranks
from local_ranks.chapters import ROOT
from local_ranks.run_files import Run
from local_ranks.scripts import launch_script, run_script
from local_ranks.stage_files import LESSON_FOLDERS
from sync_batchnorm import convert_sync_batchnorm as by_hand

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()


def start(key: str, ranks: int, folder, *flags: str) -> tuple[Run, str]:
    flags = ("--model=net-bn", "--epochs=5", "--device=cuda", *flags, f"--run-dir={folder}")
    flags += (f"--world-size={ranks}",) if key == "03" else ()
    script = f"{LESSON_FOLDERS[key].relative_to(ROOT)}/train.py"
    by_torchrun = key in ("04", "05", "survive")
    if key in ("04", "05") and ranks > GPUS:
        flags += ("--backend=gloo",)  # nccl needs a GPU for each rank
    answers = (
        launch_script(script, *flags, world_size=ranks)
        if by_torchrun
        else run_script(script, *flags)
    )
    assert all(status == 0 for status, _ in answers), "\n".join(output for _, output in answers)
    return Run(folder, [], ""), answers[0][1]


RUNS_ON_GPUS = ["01 1", "02 1", "03 2", "04 1", "04 2", "05 1 --amp=bf16", "05 2"]
RUNS_ON_GPUS += ["05 2 --amp=bf16", "survive 1"]  # one rank has its own GPU: nccl beside gloo
RUNS_ON_GPUS += ["survive 2 --amp=fp16 --clip-norm=1 --accumulate=2"]
if GPUS > 1:  # about 120, for as many steps as the other runs have
    RUNS_ON_GPUS.append(f"03 {GPUS} --backend=nccl --batch-size={120 // GPUS * GPUS}")


@pytest.mark.parametrize("call", RUNS_ON_GPUS)
def test_a_stage_learns_on_a_gpu(call, tmp_path):
    key, ranks, *flags = call.split()
    run, output = start(key, int(ranks), tmp_path, *flags)
    assert run.summary["device"] == "cuda"
    assert run.summary["test_accuracy"] > 0.9
    assert ("gloo, not nccl" in output) == (key == "survive" and int(ranks) > GPUS)


def test_05_on_two_ranks_repeats_01_on_the_gpu(tmp_path):
    """The control is 05 without SyncBatchNorm."""
    one = start("01", 1, tmp_path / "one")[0].losses
    two = start("05", 2, tmp_path / "two")[0].losses
    control = start("05", 2, tmp_path / "control", "--no-sync-bn")[0].losses
    # GPUs compute convolutions in TF32; imitated on a CPU, it changes a loss by 1e-4 at most.
    assert (one - two).abs().max() < 2e-3
    assert (one - control).abs().max() > 5e-3


@on_ranks(2)
def test_sync_batchnorm_by_hand_is_torchs_on_the_gpu(rank):
    torch.cuda.set_device(0)
    results = []
    for convert in (by_hand, nn.SyncBatchNorm.convert_sync_batchnorm):
        torch.manual_seed(rank)
        rows, weights = torch.randn(2, 3 + 2 * rank, 4, 5, 6, dtype=torch.float64, device="cuda")
        rows = (rows * 3 + 5).requires_grad_()
        layer = convert(nn.Sequential(nn.BatchNorm2d(4, device="cuda", dtype=torch.float64)))
        output = layer(rows)
        (output * weights).sum().backward()
        tensors = [output, rows.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
        results.append([tensor.detach().cpu() for tensor in tensors])
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@on_ranks(1)
def test_01_rehearses_what_a_step_takes_on_the_gpu(rank):
    for plan in (peak.Plan("resnet50", 224, "adam"), peak.Plan("resnet18", 64, "momentum")):
        predicted, measured = peak.rehearsed_peak(plan, 64)[0], peak.measured_peak(plan, 64)
        assert predicted < 1.05 * measured
        assert measured - predicted < max(0.05 * measured, 2**28)  # cuDNN's workspaces: not counted
