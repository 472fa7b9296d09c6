"""Loss scaling by hand: what it rescues, that it is torch's GradScaler. And claim C10."""

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import chapter, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD


def loss_scaling():
    return chapter("05", "loss_scaling")


def ours(**settings):
    return loss_scaling().LossScaler(**settings)


def torchs(**settings):
    return torch.amp.GradScaler("cpu", **settings)


# --- What it rescues


@cache
def gradients():
    """Of net-bn on the digits: fp32 first, then each format of the chapter."""
    module = loss_scaling()
    ways = {"fp32": (None, 1.0), **module.FORMATS}
    return {name: module.gradients_of(*module.example(), *how) for name, how in ways.items()}


def share_of_zeros(name):
    true, found = gradients()["fp32"][0], gradients()[name][0]
    return {key: (found[key][true[key] != 0] == 0).double().mean().item() for key in true}


def test_numbers_below_2_to_the_minus_25_are_zero_in_fp16():
    assert torch.tensor(2.0**-25).half() == 0
    assert torch.tensor(2.0**-25 * 1.01).half() == 2.0**-24  # its smallest
    assert torch.tensor(2.0**-125).bfloat16() == 2.0**-125


def test_c10_it_keeps_small_gradients_from_becoming_zero_in_fp16():
    """Almost a third of the gradients of two layers' outputs, and none with the loss scaled."""
    alone, scaled = share_of_zeros("fp16"), share_of_zeros("fp16, loss × 65536")
    assert min(alone["conv1"], alone["norm1"]) > 0.25
    assert max(scaled.values()) < 0.001
    assert all(
        gradient.isfinite().all() for gradient in gradients()["fp16, loss × 65536"][0].values()
    )


def test_c10_bf16_needs_none():
    assert max(share_of_zeros("bf16").values()) < 0.001


def test_what_is_lost_is_missing_in_the_weights_gradients():
    """None of them is zero, since each is a sum over many places; but the sum lacks many terms."""
    off = {}
    true = gradients()["fp32"][1]["conv1"]
    for name in loss_scaling().FORMATS:
        found = gradients()[name][1]["conv1"]
        assert (found != 0).all()
        off[name] = ((found - true).norm() / true.norm()).item()
    assert off["fp16"] > 0.05
    assert max(off["fp16, loss × 65536"], off["bf16"]) < 0.01


# --- It is torch's


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
            loss = F.cross_entropy(model(images[step]), labels) * factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in overflows:
            model[2].weight.grad[1, 3] = overflows[step]
        if clip == "before":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if clip == "after":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if model[0].weight.equal(before):
            skipped.append(step)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    return scales, skipped, [p.detach() for p in model.parameters()], momenta


INJECTED = {4: math.inf, 11: -math.inf, 12: math.nan, 29: math.inf}
CASES = {
    "overflows": ({"growth_interval": 3}, INJECTED),
    "first step overflows": ({"growth_interval": 4}, {0: math.nan}),
    "growth at each step": ({"growth_interval": 1, "init_scale": 2.0}, {}),
    "too large at first": ({"init_scale": 2.0**28}, {}),
}


@pytest.mark.parametrize("clip", ["never", "after"])
@pytest.mark.parametrize("name", CASES)
def test_by_hand_it_is_gradscaler_to_the_bit(name, clip):
    """The same scales, the same skipped steps, the same weights and momenta."""
    settings, overflows = CASES[name]
    [mine, theirs] = (run(make(**settings), overflows, clip=clip) for make in (ours, torchs))
    assert mine[:2] == theirs[:2]
    for tensors in zip(mine[2] + mine[3], theirs[2] + theirs[3], strict=True):
        assert torch.equal(*tensors)
    assert len(set(mine[0])) > 1, "the scale never changed"
    skipped = {0, 1, 2} if name == "too large at first" else set(overflows)
    assert skipped <= set(mine[1]), "and where it grew too large"


def test_another_interval_is_another_run():
    """The control: the comparison sees when the scale grows, and which steps are skipped."""
    theirs = run(torchs(growth_interval=3), INJECTED)
    assert run(ours(growth_interval=4), INJECTED)[0] != theirs[0]
    fewer = dict(list(INJECTED.items())[:-1])
    assert run(ours(growth_interval=3), fewer)[1] != theirs[1]


@pytest.mark.parametrize("make", [ours, torchs])
def test_clipping_before_unscaling_clips_to_almost_nothing(make):
    """The limit is then one of scaled gradients: 65,536 times too small."""
    still = run(make(), clip="before", steps=4)[2][0]
    start = run(make(), clip="before", steps=0)[2][0]
    right = run(make(), clip="after", steps=4)[2][0]
    assert (still - start).abs().max() < 1e-4 < 0.1 < (right - start).norm()


@pytest.mark.parametrize("make", [ours, torchs])
def test_unscaling_twice_is_refused(make):
    model = nn.Linear(2, 1)
    optimizer, scaler = SGD(model.parameters(), 0.1), make()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)


def _overflow_of_one(rank, wrapped):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    forward = DistributedDataParallel(model) if wrapped else model
    optimizer, scaler = SGD(model.parameters(), 0.1), ours()
    for step in range(3):
        optimizer.zero_grad()
        loss = forward(torch.full((2, 4), 1.0 + rank)).sum()
        scaler.scale(loss * (math.inf if (rank, step) == (1, 1) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), model.weight.tolist()


def test_under_ddp_all_ranks_skip_what_one_of_them_cannot_take():
    first, second = run_ranks(2, _overflow_of_one, True)
    assert first == second
    assert first[0] == 2.0**15
    assert [scale for scale, _ in run_ranks(2, _overflow_of_one, False)] == [2.0**16, 2.0**15]


# --- C10: GradScaler speeds up convergence


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_c10_where_no_gradient_is_too_small_it_changes_no_bit(dtype):
    """So it cannot make training converge faster."""
    scaled, plain = (
        run(torchs(enabled=enabled), clip="never", dtype=dtype) for enabled in (True, False)
    )
    for tensors in zip(scaled[2], plain[2], strict=True):
        assert torch.equal(*tensors)


def test_c10_in_fp16_weights_whose_gradients_are_too_small_do_not_move_without_it():
    """A loss that is a ten-millionth: its gradients are zero in fp16, and not with GradScaler."""
    moved = {}
    for name, dtype, enabled in (
        ("fp32", None, False),
        ("without", torch.float16, False),
        ("with", torch.float16, True),
    ):
        weights = run(torchs(enabled=enabled), clip="never", dtype=dtype, factor=1e-7)[2][0]
        moved[name] = (weights - run(torchs(), steps=0)[2][0]).norm().item()
    assert moved["fp32"] > 0
    assert moved["with"] == pytest.approx(moved["fp32"], rel=0.02)
    assert moved["without"] < moved["fp32"] / 10
