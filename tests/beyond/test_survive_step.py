"""beyond/survive/train.py: a scaled, clipped, accumulated and scheduled step is one process's."""

import math
from functools import partialmethod
from unittest.mock import patch

import pytest
import torch
from torch.optim import SGD

from accumulate import count_buckets
from helpers.on_ranks import run_on_ranks
from helpers.replayed_runs import distances, replayed_flags
from local_ranks import oracle
from local_ranks.machine import scratch_folder
from local_ranks.run_files import Run
from local_ranks.train_stage import FP32, ON_CPU, load_stage, run_main, train, train_once

CLIP = 0.5  # below the norm of nearly every step of these runs


@pytest.mark.parametrize(("ranks", "amp"), [(1, "off"), (3, "fp16")])
def test_clipping_equals_that_of_one_process_on_the_whole_batch(ranks, amp, changes=()):
    """In float64, autocast changes nothing, and the loss is scaled all the same."""
    flags = (f"--clip-norm={CLIP}", f"--amp={amp}")
    clipped = distances("survive", ranks, flags, oracle.whole_batches, changes, clip=CLIP)
    assert max(clipped) < 1e-10
    assert max(distances("survive", ranks, flags, oracle.whole_batches, changes)) > 1e-3
    first, *others = train_once("survive", ranks, *replayed_flags(), *flags, changes=changes).states
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_survive_clips_gradients_not_scaled_ones(changes=()):
    test_clipping_equals_that_of_one_process_on_the_whole_batch(2, "fp16", changes)


@pytest.mark.parametrize(("ranks", "k"), [(2, 3), (3, 2)])
def test_micro_batches_clipping_and_schedule_together_are_one_process(ranks, k):
    """It takes the same micro-batches, and clips and changes its rate once a step. In float64."""
    flags = (f"--accumulate={k}", f"--clip-norm={CLIP}", "--lr-decay=cosine", "--max-steps=9")
    flags += ("--warmup-epochs=0.5",)
    rates = [0.02 * min(1, (n + 1) / 2.5) for n in range(3)]
    rates += [0.02 * math.cos(math.pi * (n - 2.5) / 25) ** 2 for n in range(3, 9)]
    settings = {"lr": rates.__getitem__, "clip": CLIP, "max_steps": 9, "statistics": False}
    same = distances("survive", ranks, flags, oracle.micro_batches(ranks, k), **settings)
    assert max(same) < 1e-10
    # The control: BatchNorm sees micro-batches, so it is not the gradient of the whole batch.
    assert min(distances("survive", ranks, flags, oracle.whole_batches, **settings)) > 1e-4


def _steps_taken(rank, flags) -> int:
    too_large = partialmethod(torch.amp.GradScaler.__init__, init_scale=2.0**24)
    count = patch.object(SGD, "step", autospec=True, side_effect=SGD.step)
    with patch.object(torch.amp.GradScaler, "__init__", too_large), count as step:
        run_main(load_stage("survive"), rank, *flags)
    return step.call_count


def test_a_step_that_overflows_is_skipped_on_all_ranks_and_counts_in_the_schedule(tmp_path):
    """An epoch of 12 steps, a warm-up by hundredths; and two more."""
    flags = (*ON_CPU, f"--run-dir={tmp_path}", "--amp=fp16", "--model=net-bn", "--max-steps=14")
    taken = run_on_ranks(2, _steps_taken, (*flags, "--warmup-epochs=1", "--lr=0.12"))
    run = Run(tmp_path, [], "")
    skipped = round(24 - math.log2(run.checkpoint["scaler"]["scale"]))  # each halves the scale
    assert 0 < skipped < 12
    assert taken == [14 - skipped] * 2
    assert all(weight.isfinite().all() for weight in run.checkpoint["model"].values())
    rates = [line["lr"] for line in run.metrics]
    assert rates == pytest.approx([0.01 * min(12, 1 + step) for step in range(14)])


def _bytes_reduced(rank, flags, changes) -> list[int]:
    stage, sizes = load_stage("survive", changes), []
    wrap = stage.DistributedDataParallel

    def wrap_counted(*args, **settings):
        sizes.append(count_buckets(ddp := wrap(*args, **settings)))
        return ddp

    stage.DistributedDataParallel = wrap_counted
    run_main(stage, rank, *flags)
    return sizes[0]


def test_survive_ranks_meet_once_a_step_however_many_micro_batches(changes=()):
    flags = (*ON_CPU, f"--run-dir={scratch_folder()}", "--max-steps=5", "--accumulate=3")
    assert run_on_ranks(2, _bytes_reduced, flags, changes) == [[4 * 21_840] * 6] * 2, (
        "the first orders buckets"
    )


def test_a_run_that_another_stage_began_is_at_its_place_in_the_schedule():
    """After one epoch with a batch of 120, the epoch is the place, whatever the batch is now."""
    first = train_once("04", 2, "--model=net-bn", "--epochs=1", **FP32)
    flags = ("--model=net-bn", "--epochs=3", "--lr-decay=cosine", "--warmup-epochs=0.5")
    flags += ("--batch-size=60", f"--resume={first.folder / 'checkpoint.pt'}", "--max-steps=40")
    expected = [0.02 * math.cos(math.pi * (n - 12.5) / 125) ** 2 for n in range(25, 53)]
    line = "rates = learning_rates(args, epoch, len(loader))[progress.epoch_step :]"
    counted = ("train.py", line, line.replace("epoch,", "progress.step // len(loader),"))
    for changes in ((), (counted,)):  # the control: 12 steps of 120 are half an epoch of 25
        run = train("survive", 1, *flags, **FP32, changes=changes)
        assert [line["epoch"] for line in run.metrics] == [1] * 25 + [2] * 3
        same = [line["lr"] for line in run.metrics] == pytest.approx(expected)
        assert same == (changes == ())
