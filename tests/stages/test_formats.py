"""16-bit formats bring speed and keep accuracy as 05's pages say, where a machine has units.

What C09 and C12 say of speed is read from the committed measurements, because a test asserts no
time. That cuDNN's choice of algorithm changes no bit on a CPU is C18.
"""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import formats
from benchmarks import result_files
from benchmarks.tables.pages import find_tables
from helpers.small_data import few_digits
from local_ranks.chapters import ROOT
from local_ranks.train_stage import FP32, ONE_EPOCH, train_once


def test_what_the_machine_runs_and_has_units_for_is_told(capsys):
    """The machine has no GPU, and its CPU has units for bf16 and refuses fp16."""

    def conv(x, *_):
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            raise RuntimeError("not implemented for 'Half'")
        return x

    units = patch.object(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "fp16": False})
    no_gpu = patch.object(torch.cuda, "is_available", lambda: False)
    with patch.object(formats.F, "conv2d", conv), units, no_gpu:
        formats.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[8:]]
    assert rows == [["fp32", "yes", "yes"], ["bf16", "yes", "yes"], ["fp16", "no", "no"]]
    with patch.object(torch.cuda, "get_device_capability", lambda device: (7, 5)):
        supported = [formats.has_units(name, torch.device("cuda")) for name in formats.FORMATS]
    assert supported == [True, False, False, True]


def claim(name: str) -> str:
    lines = (ROOT / "docs/claims.md").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"| {name} ")).split("|")[3]


def test_c09_c12_in_the_committed_runs_bf16_is_faster_and_there_is_no_one_number():
    faster = {}
    for name, both in result_files.load("once/precision")["models"].items():
        for where, place in both.items():
            rows = place["variants"]
            best, noise = (rows[v]["ratio_interval"] for v in ("bf16, channels_last", "A/A"))
            assert best[1] < min(noise[0], 1), "no more than noise"
            for variant in (each for each in rows if each.startswith("bf16")):
                plain = rows[variant.replace("bf16", "fp32")]["ratio"]
                faster[name, where, variant] = plain / rows[variant]["ratio"]
    smallest, largest = min(faster.values()), max(faster.values())
    assert largest / smallest > 1.2
    assert all(f"{number:.1f}" in claim("C12") for number in (smallest, largest))
    rows = result_files.load("once/precision")["models"]["resnet50"]["one process"]["variants"]
    for variant in ("bf16", "bf16, channels_last"):
        assert f"{rows['fp32']['ratio'] / rows[variant]['ratio']:.1f}" in claim("C09"), variant


LAYOUTS = ("contiguous", "channels_last")


def speeds_on_a_gpu(model: str) -> dict[str, float]:
    variants = find_tables()["formats"].results()["models"][model]["variants"]
    return {name: row["images_per_second"] for name, row in variants.items()}


def test_c09_c12_c18_on_the_measured_gpu_bf16_gains_little_over_tf32_and_tuning_nothing():
    over_fp32, over_tf32, tuned = [], [], []
    for model in ("resnet50", "resnet18"):
        speed = speeds_on_a_gpu(model)
        for layout in LAYOUTS:
            fp32, tf32, bf16 = (speed[f"{name}, {layout}"] for name in ("fp32", "tf32", "bf16"))
            over_fp32.append(bf16 / fp32)
            over_tf32.append(bf16 / tf32)
    speed = speeds_on_a_gpu("resnet50")
    for name in ("tf32", "bf16", "fp16"):
        for layout in LAYOUTS:
            plain = speed[f"{name}, {layout}"]
            tuned.append(speed[f"{name}, {layout}, cudnn.benchmark"] / plain)
    least, most = min(over_fp32), max(over_fp32)
    assert f"bf16 gives {least:.1f} to {most:.1f} times" in claim("C12")
    assert f"only {min(over_tf32):.2f} to {max(over_tf32):.2f} times" in claim("C12")
    assert f"{min(tuned):.2f} to {max(tuned):.2f} times" in claim("C18")
    fastest = speed["bf16, channels_last"] / speed["fp32, contiguous"]
    gains = f"{speed['bf16, contiguous'] / speed['fp32, contiguous']:.1f} times as fast in bf16"
    assert f"{gains} as in fp32, and {fastest:.1f} times" in claim("C09")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batchnorm_is_why_fp16_was_faster_than_bf16(layout):
    speed = speeds_on_a_gpu("resnet50")
    fp16, bf16 = speed[f"fp16, {layout}"], speed[f"bf16, {layout}"]
    assert fp16 > 1.2 * bf16, "the control: there is something to explain"
    assert speed[f"fp16, {layout}, own BatchNorm"] == pytest.approx(bf16, rel=0.01)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_c09_autocast_learns_as_well_as_fp32_on_the_digits(amp):
    """Runs on every CPU: formats without units are imitated."""
    flags = ("--model=net-bn", "--epochs=2", "--batch-size=60", "--lr=0.05")
    plain, mixed = (
        train_once("05", 1, *flags, f"--amp={a}", dtype=torch.float32) for a in ("off", amp)
    )
    learned, other = (run.summary["test_accuracy"] for run in (plain, mixed))
    assert learned > 0.9
    assert abs(learned - other) < 0.03
    assert not torch.equal(plain.losses, mixed.losses)  # the control: it did compute otherwise
    assert mixed.checkpoint["model"]["fc1.weight"].dtype == torch.float32, "the weights stay fp32"


def test_05_bf16_computes_in_16_bits(changes=()):
    """Its losses are near those of fp32, but rounded otherwise."""
    flags = (*few_digits(), *ONE_EPOCH)
    fp32, bf16 = (
        train_once("05", 2, *flags, f"--amp={amp}", **FP32, changes=changes).losses
        for amp in ("off", "bf16")
    )
    assert 1e-5 < (fp32 - bf16).abs().max().item() < 1e-2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_c18_cudnn_benchmark_changes_no_bit_on_a_cpu_and_few_on_a_gpu(device):
    torch.manual_seed(0)
    layer, outputs = nn.Conv2d(64, 64, 3, padding=1).to(device), []
    images = [torch.randn(32, 64, size, size, device=device) for size in (16, 8, 16)]
    for on in (False, True):
        with torch.backends.cudnn.flags(enabled=True, benchmark=on, allow_tf32=True):
            outputs.append([layer(each) for each in images])
    near = 0 if device == "cpu" else 1e-2
    torch.testing.assert_close(*outputs, rtol=near, atol=near)
