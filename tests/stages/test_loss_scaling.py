"""The scale of the loss: by hand it is GradScaler to the bit, and what fp16 needs it for (C10)."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import loss_scaling
from helpers.on_ranks import gather_from_ranks, on_ranks
from helpers.outputs import rows_on_page


def test_c10_gradscaler_keeps_small_gradients_from_becoming_zero_in_fp16_and_bf16_needs_none():
    zeros, off = (
        row[1:] for row in rows_on_page("05_amp_syncbn/loss_scaling.py") if row[:1] == ["conv1"]
    )
    assert int(zeros[0]) > 25
    assert zeros[1:] == ["0", "0"]
    assert int(off[0]) > 5
    assert off[1:] == ["<1", "<1"]
    assert torch.tensor(2.0**-25).half() == 0
    assert torch.tensor(2.0**-25 * 1.01).half() == 2.0**-24  # the smallest of fp16
    assert torch.tensor(2.0**-125).bfloat16() == 2.0**-125


torch_scaler = partial(torch.amp.GradScaler, "cpu")


def run(scaler, overflows=(), steps=30, clip="after", dtype=torch.float16, factor=1.0):
    """The scale after each step, the steps that were skipped, the last weights and momenta."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    images, labels = torch.randn(steps, 24, 8), torch.arange(24) % 3
    optimizer = SGD(model.parameters(), 0.2, 0.9)
    scales, skipped = [], []
    for step in range(steps):
        before = model[0].weight.detach().clone()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(images[step]), labels) * factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in overflows:
            model[2].weight.grad[1, 3] = overflows[step]
        if clip == "after":
            scaler.unscale_(optimizer)
        if clip != "never":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if model[0].weight.equal(before):
            skipped.append(step)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    return scales, skipped, [p.detach() for p in model.parameters()], momenta


INJECTED = {4: math.inf, 11: -math.inf, 12: math.nan, 29: math.inf}
SCALED_RUNS = {
    "overflows": ({"growth_interval": 3}, INJECTED),
    "first step overflows": ({"growth_interval": 4}, {0: math.nan}),
    "growth at each step": ({"growth_interval": 1, "init_scale": 2.0}, {}),
    "too large at first": ({"init_scale": 2.0**28}, {}),
}


@pytest.mark.parametrize("clip", ["never", "after"])
@pytest.mark.parametrize("name", SCALED_RUNS)
def test_the_loss_scaler_by_hand_is_gradscaler_to_the_bit(name, clip):
    settings, overflows = SCALED_RUNS[name]
    makers = loss_scaling.LossScaler, torch_scaler
    [by_hand, of_torch] = (run(make(**settings), overflows, clip=clip) for make in makers)
    assert by_hand[:2] == of_torch[:2]
    assert all(map(torch.equal, by_hand[2] + by_hand[3], of_torch[2] + of_torch[3]))
    assert len(set(by_hand[0])) > 1, "the scale never changed"
    skipped = {0, 1, 2} if name == "too large at first" else set(overflows)
    assert skipped <= set(by_hand[1]), "and where it grew too large"


@pytest.mark.parametrize("make", [loss_scaling.LossScaler, torch_scaler])
def test_clipping_before_unscaling_clips_to_almost_nothing(make):
    """The limit is then one of scaled gradients: 65,536 times too small. Unscaling comes once."""
    start, still = (run(make(), clip="before", steps=steps)[2][0] for steps in (0, 4))
    right = run(make(), clip="after", steps=4)[2][0]
    assert (still - start).abs().max() < 1e-4 < 0.1 < (right - start).norm()
    model = nn.Linear(2, 1)
    optimizer, scaler = SGD(model.parameters(), 0.1), make()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)


@on_ranks(2)
def test_under_ddp_all_ranks_skip_what_one_of_them_cannot_take(rank):
    for wrap in (DistributedDataParallel, nn.Identity()):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        forward = wrap(model)
        optimizer, scaler = SGD(model.parameters(), 0.1), loss_scaling.LossScaler()
        for step in range(3):
            optimizer.zero_grad()
            loss = forward(torch.full((2, 4), 1.0 + rank)).sum()
            scaler.scale(loss * (math.inf if (rank, step) == (1, 1) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        skipped = rank == 1 or wrap is DistributedDataParallel  # the control: the one alone
        assert scaler.get_scale() == 2.0 ** (16 - skipped)
        own, other = gather_from_ranks(model.weight.tolist())
        assert (own == other) == (wrap is DistributedDataParallel)


def test_c10_where_no_gradient_is_too_small_gradscaler_changes_no_bit():
    """Neither in fp32 nor in bf16. So it cannot make training converge faster."""
    for dtype in (None, torch.bfloat16):
        scaled, plain = (run(torch_scaler(enabled=on), (), 30, "never", dtype)[2] for on in (1, 0))
        assert all(map(torch.equal, scaled, plain))


def test_c10_in_fp16_weights_with_too_small_gradients_do_not_move_without_gradscaler():
    """A loss that is a ten-millionth: its gradients are zero in fp16, and not with GradScaler."""
    half = torch.float16
    start, fp32, without, scaled = (
        run(torch_scaler(enabled=on), (), steps, "never", dtype, factor=1e-7)[2][0]
        for steps, dtype, on in ((0, None, 0), (30, None, 0), (30, half, 0), (30, half, 1))
    )
    moved = (fp32 - start).norm().item()
    assert (scaled - start).norm().item() == pytest.approx(moved, rel=0.02)
    assert (without - start).norm().item() < moved / 10
