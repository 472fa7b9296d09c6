"""The stages on real GPUs; where there is none, each test says so and is skipped."""

import json

import pytest
import torch
import torch.distributed as dist
from support import Run, chapter, command, free_port, run_ranks
from torch import nn
from torch.optim import SGD

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
        ("05_amp_syncbn/train.py", 2, ("--amp=fp16", "--clip-norm=1")),
        ("05_amp_syncbn/train.py", 2, ("--amp=fp16", "--accumulate=2")),
    ],
)
def test_a_stage_learns_on_a_gpu_and_tells_its_memory(script, ranks, flags, tmp_path):
    summary, output = start(script, ranks, tmp_path, *flags)
    assert summary["device"] == "cuda"
    assert summary["test_accuracy"] > 0.9
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


def _both_kinds(rank):
    """SyncBatchNorm by hand and torch's own, on one GPU, with uneven local batches."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    results = []
    for convert in (
        chapter("05", "sync_batchnorm").convert,
        nn.SyncBatchNorm.convert_sync_batchnorm,
    ):
        torch.manual_seed(rank)
        rows, weights = torch.randn(2, 3 + 2 * rank, 4, 5, 6, dtype=torch.float64, device="cuda")
        rows = (rows * 3 + 5).requires_grad_()
        layer = convert(nn.Sequential(nn.BatchNorm2d(4, device="cuda", dtype=torch.float64)))
        output = layer(rows)
        (output * weights).sum().backward()
        tensors = [output, rows.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
        results.append([tensor.detach().cpu() for tensor in tensors])
    return results


def test_sync_batchnorm_by_hand_is_torchs_on_the_gpu():
    for by_hand, torchs in run_ranks(2, _both_kinds):
        for ours, theirs in zip(by_hand, torchs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_the_loss_scaler_by_hand_is_torchs_on_the_gpu():
    results = []
    for scaler in (
        chapter("05", "loss_scaling").LossScaler(2.0**24, growth_interval=3),
        torch.amp.GradScaler("cuda", 2.0**24, growth_interval=3),
    ):
        torch.manual_seed(0)
        model, scales = nn.Linear(64, 64, device="cuda"), []
        optimizer = SGD(model.parameters(), 0.1, 0.9)
        for _ in range(20):
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.randn(32, 64, device="cuda")).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, model.weight.detach()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def _fit(rank):
    """Rehearsed and measured peaks, and the largest batch where this process may take 1 GiB."""
    peak, fit = chapter("01", "peak"), chapter("01", "fit")
    plans = [peak.Plan("resnet50", 224, "adam"), peak.Plan("resnet18", 64, "momentum")]
    peaks = [(peak.rehearse(plan, 64)[0], peak.run(plan, 64)) for plan in plans]
    before, limit = torch.cuda.memory_allocated(), 2**30
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    real = fit.largest(lambda batch: fit.real_step_fits(plans[1], batch, 1, 0), 1)
    rehearsed = fit.largest(lambda batch: peak.rehearse(plans[1], batch)[0] <= limit, 1)
    return peaks, real, rehearsed, torch.cuda.memory_allocated() - before


def test_01_rehearses_what_a_step_takes_on_the_gpu():
    [(peaks, real, rehearsed, left)] = run_ranks(1, _fit)
    for predicted, measured in peaks:
        assert predicted == pytest.approx(measured, rel=0.05)
    assert 0.8 * rehearsed < real <= rehearsed  # the allocator needs a reserve, cuDNN workspaces
    assert left < 2**26  # no trial left its tensors behind; cuBLAS keeps a workspace
