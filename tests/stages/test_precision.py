"""Scaled, clipped, accumulated and scheduled steps are those of one process. And claim C10."""

import math
from datetime import timedelta
from functools import partial, partialmethod
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.chapters import load_chapter
from common.options import make_parser
from helpers import oracle
from helpers.local_ranks import gather_from_ranks, launch_function, on_ranks
from helpers.machine import scratch_folder
from helpers.train_stage import FP32, LOCAL, Run, load_stage, run_main, train, train_once
from repository_pages import fences
from test_equals_one_process import FLAGS, differences

loss_scaling, schedule = load_chapter("05", "loss_scaling"), load_chapter("05", "schedule")
CLIP = 0.5  # below the norm of nearly every step of these runs


@pytest.mark.parametrize(("ranks", "amp"), [(1, "off"), (3, "fp16")])
def test_clipping_equals_that_of_one_process_on_the_whole_batch(ranks, amp, without=()):
    """In float64, autocast changes nothing, and the loss is scaled all the same."""
    flags = (f"--clip-norm={CLIP}", f"--amp={amp}")
    clipped = differences("survive", ranks, flags, oracle.whole_batches, without, clip=CLIP)
    assert max(clipped) < 1e-10
    assert max(differences("survive", ranks, flags, oracle.whole_batches, without)) > 1e-3
    first, *others = train_once("survive", ranks, *FLAGS, *flags, without=without).states
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_survive_clips_gradients_not_scaled_ones(without=()):
    test_clipping_equals_that_of_one_process_on_the_whole_batch(2, "fp16", without)


@pytest.mark.parametrize(("ranks", "k"), [(2, 3), (3, 2)])
def test_micro_batches_clipping_and_schedule_together_are_one_process(ranks, k):
    """It takes the same micro-batches, and clips and changes its rate once a step. In float64."""
    flags = (f"--accumulate={k}", f"--clip-norm={CLIP}", "--lr-decay=cosine", "--max-steps=9")
    flags += ("--warmup-epochs=0.5",)
    rates = [0.02 * min(1, (n + 1) / 2.5) for n in range(3)]
    rates += [0.02 * math.cos(math.pi * (n - 2.5) / 25) ** 2 for n in range(3, 9)]
    settings = {"lr": rates.__getitem__, "clip": CLIP, "max_steps": 9, "statistics": False}
    same = differences("survive", ranks, flags, oracle.micro_batches(ranks, k), **settings)
    assert max(same) < 1e-10
    # The control: BatchNorm sees micro-batches, so it is not the gradient of the whole batch.
    assert min(differences("survive", ranks, flags, oracle.whole_batches, **settings)) > 1e-4


def _overflow(rank, flags) -> int:
    too_large = partialmethod(torch.amp.GradScaler.__init__, init_scale=2.0**24)
    count = patch.object(SGD, "step", autospec=True, side_effect=SGD.step)
    with patch.object(torch.amp.GradScaler, "__init__", too_large), count as step:
        run_main(load_stage("survive"), rank, *flags)
    return step.call_count


def test_a_step_that_overflows_is_skipped_on_all_ranks_and_counts_in_the_schedule(tmp_path):
    """An epoch of 12 steps, a warm-up by hundredths; and two more."""
    flags = (*LOCAL, f"--run-dir={tmp_path}", "--amp=fp16", "--model=net-bn", "--max-steps=14")
    taken = launch_function(2, _overflow, (*flags, "--warmup-epochs=1", "--lr=0.12"))
    run = Run(tmp_path, [], "")
    skipped = round(24 - math.log2(run.checkpoint["scaler"]["scale"]))  # each halves the scale
    assert 0 < skipped < 12
    assert taken == [14 - skipped] * 2
    assert all(weight.isfinite().all() for weight in run.checkpoint["model"].values())
    rates = [line["lr"] for line in run.metrics]
    assert rates == pytest.approx([0.01 * min(12, 1 + step) for step in range(14)])


def _reduced(rank, flags, without) -> list[int]:
    stage, sizes = load_stage("survive", without), []
    wrap, count = stage.DistributedDataParallel, load_chapter("05", "accumulate").count_buckets

    def wrap_counted(*args, **settings):
        sizes.append(count(ddp := wrap(*args, **settings)))
        return ddp

    stage.DistributedDataParallel = wrap_counted
    run_main(stage, rank, *flags)
    return sizes[0]


def test_survive_ranks_meet_once_a_step_however_many_micro_batches(without=()):
    flags = (*LOCAL, f"--run-dir={scratch_folder()}", "--max-steps=5", "--accumulate=3")
    assert launch_function(2, _reduced, flags, without) == [[4 * 21_840] * 6] * 2, (
        "the first orders buckets"
    )


BOTH = ("--lr-decay=cosine", "--warmup-epochs=1", "--lr-rule=linear", "--base-batch-size=240")
RATES = {
    ("--lr-rule=linear", "--base-batch-size=30"): [4.0] * 24,
    ("--lr-rule=sqrt", "--base-batch-size=30"): [2.0] * 24,
    ("--base-batch-size=1",): [1.0] * 24,
    ("--warmup-epochs=0.5",): [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6] + [1.0] * 19,
    ("--warmup-epochs=9",): [(n + 1) / 108 for n in range(24)],
    ("--warmup-epochs=1.9", "--lr-decay=cosine"): [min(1, (n + 1) / 22.8) for n in range(23)]
    + [math.cos(math.pi / 12) ** 2],
    ("--lr-decay=step",): [1.0] * 8 + [0.1] * 8 + [0.01] * 8,
    BOTH: [0.5 * (n + 1) / 12 for n in range(12)]
    + [0.5 * math.cos(math.pi * n / 24) ** 2 for n in range(12)],
}


@pytest.mark.parametrize("flags", RATES, ids=" ".join)
def test_learning_rate_of_every_step(flags):
    schedule.add_schedule(parser := make_parser("", ""))
    args = parser.parse_args(["--epochs=2", *flags])
    rates = [rate for epoch in range(2) for rate in schedule.learning_rates(args, epoch, 12)]
    assert rates == pytest.approx([0.02 * factor for factor in RATES[flags]], rel=1e-9)


def test_a_run_that_another_stage_began_is_at_its_place_in_the_schedule():
    """After one epoch with a batch of 120: the epoch is the place, whatever the batch is now."""
    first = train_once("04", 2, "--model=net-bn", "--epochs=1", **FP32)
    flags = ("--model=net-bn", "--epochs=3", "--lr-decay=cosine", "--warmup-epochs=0.5")
    flags += ("--batch-size=60", f"--resume={first.folder / 'checkpoint.pt'}", "--max-steps=40")
    expected = [0.02 * math.cos(math.pi * (n - 12.5) / 125) ** 2 for n in range(25, 53)]
    line = "rates = schedule.learning_rates(args, epoch, len(loader))[progress.epoch_step :]"
    counted = ("train.py", line, line.replace("epoch,", "progress.step // len(loader),"))
    for without in ((), (counted,)):  # the control: 12 steps of 120 are half an epoch of 25
        run = train("survive", 1, *flags, **FP32, without=without)
        assert [line["epoch"] for line in run.metrics] == [1] * 25 + [2] * 3
        same = [line["lr"] for line in run.metrics] == pytest.approx(expected)
        assert same == (without == ())


def shown(program) -> list[list[str]]:
    """The cells that the README shows; test_the_output_shown_is_the_output runs the program."""
    command = f"python 05_amp_syncbn/{program}"
    text = next(fence.text for fence in fences("text") if fence.command == command)
    return [line.split() for line in text.splitlines()]


def test_05_the_linear_rule_makes_up_for_fewer_updates_until_it_diverges():
    losses = {" ".join(row[2:-1]): row[-1] for row in shown("large_batch.py") if row[1:]}
    small, large = float(losses["0.05"]), float(losses["none 0.05"])
    assert large > 2 * small
    assert max(float(losses["sqrt 0.14"]), float(losses["linear 0.40"])) < large / 1.5
    assert (losses["linear 1.60"], losses["linear 1.60 2"]) == ("diverged", "unsteady")
    assert float(losses["none 0.20"]) < 0.1


def test_05_a_rate_that_is_kept_while_the_batch_shrinks_diverges_unless_it_is_divided():
    rows = shown("large_batch.py")
    divided = {row[2]: row[-1] for row in rows if row[1:2] == ["÷"]}
    assert ["30", "kept", "0.40", "diverged"] in rows, "the control"
    assert float(divided["8"]) < float(divided["√8"]) < 0.1


def test_c10_it_keeps_small_gradients_from_becoming_zero_in_fp16_and_bf16_needs_none():
    zeros, off = (row[1:] for row in shown("loss_scaling.py") if row[:1] == ["conv1"])
    assert int(zeros[0]) > 25
    assert zeros[1:] == ["0", "0"]
    assert int(off[0]) > 5
    assert off[1:] == ["<1", "<1"]
    assert torch.tensor(2.0**-25).half() == 0
    assert torch.tensor(2.0**-25 * 1.01).half() == 2.0**-24  # its smallest
    assert torch.tensor(2.0**-125).bfloat16() == 2.0**-125


torchs = partial(torch.amp.GradScaler, "cpu")


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
CASES = {
    "overflows": ({"growth_interval": 3}, INJECTED),
    "first step overflows": ({"growth_interval": 4}, {0: math.nan}),
    "growth at each step": ({"growth_interval": 1, "init_scale": 2.0}, {}),
    "too large at first": ({"init_scale": 2.0**28}, {}),
}


@pytest.mark.parametrize("clip", ["never", "after"])
@pytest.mark.parametrize("name", CASES)
def test_by_hand_it_is_gradscaler_to_the_bit(name, clip):
    settings, overflows = CASES[name]
    makers = loss_scaling.LossScaler, torchs
    [by_hand, of_torch] = (run(make(**settings), overflows, clip=clip) for make in makers)
    assert by_hand[:2] == of_torch[:2]
    assert all(map(torch.equal, by_hand[2] + by_hand[3], of_torch[2] + of_torch[3]))
    assert len(set(by_hand[0])) > 1, "the scale never changed"
    skipped = {0, 1, 2} if name == "too large at first" else set(overflows)
    assert skipped <= set(by_hand[1]), "and where it grew too large"


@pytest.mark.parametrize("make", [loss_scaling.LossScaler, torchs])
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


def test_c10_where_no_gradient_is_too_small_it_changes_no_bit():
    """Neither in fp32 nor in bf16. So it cannot make training converge faster."""
    for dtype in (None, torch.bfloat16):
        scaled, plain = (run(torchs(enabled=on), (), 30, "never", dtype)[2] for on in (1, 0))
        assert all(map(torch.equal, scaled, plain))


def test_c10_in_fp16_weights_whose_gradients_are_too_small_do_not_move_without_it():
    """A loss that is a ten-millionth: its gradients are zero in fp16, and not with GradScaler."""
    half = torch.float16
    start, fp32, without, scaled = (
        run(torchs(enabled=on), (), steps, "never", dtype, factor=1e-7)[2][0]
        for steps, dtype, on in ((0, None, 0), (30, None, 0), (30, half, 0), (30, half, 1))
    )
    moved = (fp32 - start).norm().item()
    assert (scaled - start).norm().item() == pytest.approx(moved, rel=0.02)
    assert (without - start).norm().item() < moved / 10


@on_ranks(2)
def test_05_no_sync_on_one_rank_only_makes_the_other_wait(rank):
    """Both ranks are in no_sync; then only rank 0 is, so that rank 1 averages alone."""
    for both in (True, False):
        dist.barrier()  # ranks may start late; from here on, they need little time
        impatient = dist.new_group(timeout=timedelta(seconds=2))
        ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=impatient)
        ddp(torch.ones(1, 2)).sum().backward()
        continues = both or rank == 0
        with ddp.no_sync() if continues else pytest.raises(RuntimeError):
            ddp(torch.ones(1, 2)).sum().backward()
