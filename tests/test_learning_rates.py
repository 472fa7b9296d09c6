"""What is said about learning rates when the batch shrinks or grows, checked with what was run."""

import json
import math
import re
import statistics
from argparse import Namespace
from typing import Any

import pytest
import torch
from support import ROOT, chapter, command, load_stage

shrink: Any = chapter("01", "learning_rate")
grow: Any = chapter("05", "large_batch")

CHANCE = math.log(10)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """The chapters read data/ below the folder that they are started in."""
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- The chapters: small models in float64


def test_01_the_rate_of_a_batch_8_times_as_large_is_too_much_undivided():
    assert shrink.sweep(240, 0.4) < 0.2
    assert not shrink.sweep(30, 0.4) < CHANCE
    assert shrink.sweep(30, 0.4 / 8) < 0.2
    assert shrink.sweep(30, 0.4 / 8**0.5) < 0.2


def test_01_divided_by_k_a_rate_goes_as_far_in_k_steps():
    """Goyal et al. 2017, section 2.1, with a rate so small that the weights hardly change."""
    images, labels, *_ = shrink.digits()

    def moved(batch, lr):
        model = shrink.new_model(0)
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        optimizer = torch.optim.SGD(model.parameters(), lr)
        for chosen in torch.arange(240).split(batch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before

    large = moved(240, 0.01)
    assert (moved(30, 0.01 / 8) - large).norm() < 0.02 * large.norm()
    assert (moved(30, 0.01) - large).norm() > 5 * large.norm()  # the control: undivided


def test_05_the_linear_rule_makes_up_for_fewer_updates():
    small = grow.median(30, 0.05, "none", 0)
    large = {rule: grow.median(240, 0.05, rule, 0) for rule in grow.RULES}
    assert large["none"] > 2 * small
    assert large["sqrt"] < large["none"] / 1.5
    assert large["linear"] < large["none"] / 1.5


def test_05_where_the_linear_rule_diverges_a_warm_up_helps_but_does_not_make_it_good():
    at_once, warmed_up = (grow.median(240, 0.2, "linear", epochs) for epochs in (0, 2))
    assert not at_once < CHANCE
    assert 0.17 < warmed_up < CHANCE
    assert grow.median(240, 0.2, "none", 0) < 0.1


def test_05_the_chapter_trains_with_the_rates_of_the_stage_and_tells_them():
    assert grow.learning_rates is load_stage("05").learning_rates
    args = Namespace(lr=0.05, batch_size=240, base_batch_size=30, epochs=16)
    args.warmup_epochs, args.lr_decay = 0, "none"
    for args.lr_rule, growth in grow.RULES.items():
        assert grow.learning_rates(args, 3, 6) == [0.05 * growth] * 6


def printed_rates(*flags):
    """What schedule.py prints: the first and the last rate of each epoch."""
    [(status, output)] = command("05_amp_syncbn/schedule.py", *flags)
    assert status == 0
    return [tuple(map(float, re.findall(r"\d\.\d{4}", line))) for line in output.splitlines()]


def test_05_schedule_prints_a_rate_that_rises_and_then_falls():
    """By default: 4 times the batch with the linear rule, 2 epochs of warm-up, then a cosine."""
    epochs = printed_rates()
    assert len(epochs) == 10
    assert all(first < last for first, last in epochs[:2])
    assert epochs[1][1] == 0.02 * 480 / 120
    assert all(first > last for first, last in epochs[2:])
    assert epochs[-1][1] < 0.0001


def test_05_schedule_takes_the_flags_of_the_stage():
    flags = ("--lr-rule=none", "--lr-decay=none", "--warmup-epochs=0", "--epochs=3", "--lr=0.5")
    assert printed_rates(*flags) == [(0.5, 0.5)] * 3


@pytest.mark.parametrize("module", [shrink, grow], ids=["01", "05"])
def test_what_a_chapter_prints_does_not_hang_on_the_last_bits_of_a_number(
    module, monkeypatch, capsys
):
    """As on another CPU: the weights begin a little beside; two seeds of rates that may differ."""
    exact, start = {}, module.new_model

    def beside(seed):
        model = start(seed)
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 1e-11 * torch.randn(weight.shape, generator=noise).double())
        return model

    monkeypatch.setattr(module, "EPOCHS", 4)
    calls = (
        [(30, 0.05), (60, 0.1), (120, 0.28)]
        if module is shrink
        else [(30, 0.05, "none", 0), (240, 0.05, "none", 2), (240, 0.05, "linear", 0)]
    )
    function = module.sweep if module is shrink else module.median
    exact = {call: function(*call) for call in calls}
    monkeypatch.setattr(module, "new_model", beside)
    for call, loss in exact.items():
        assert function(*call) == pytest.approx(loss, abs=1e-4)


# --- The pictures: runs of the real stages


def runs_of(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["runs"]


def median(runs):
    losses = [math.inf if run["test_loss"] is None else run["test_loss"] for run in runs]
    return statistics.median(losses)


def largest_that_works(by_lr):
    return max(float(lr) for lr, runs in by_lr.items() if median(runs) <= 0.12)


def test_01_on_the_picture_the_largest_rate_falls_by_more_than_root_k_and_less_than_k():
    runs = runs_of("01_learning_rate")
    tuned = largest_that_works(runs["240"])
    for k in (4, 8):
        by_lr = runs[str(240 // k)]
        assert k**0.5 <= 1.01 * tuned / largest_that_works(by_lr)
        assert tuned / largest_that_works(by_lr) < k
        kept, divided = (median(by_lr[f"{lr:.5f}".rstrip("0")]) for lr in (tuned, tuned / k))
        assert kept > 1.5  # near guessing
        assert divided < 0.05


def test_05_on_the_picture_the_linear_rule_learns_faster_until_it_diverges():
    runs = runs_of("05_learning_rates")
    last = {
        name: statistics.median(r["losses"][-1] for r in each)
        for name, each in runs["0.04"].items()
    }
    assert last["linear"] < last["sqrt"] < last["none"] / 3
    assert last["batch 30"] < last["linear"]
    for name in ("linear", "linear, warm-up 2 epochs"):
        assert not median(runs["0.16"][name]) < CHANCE
    assert median(runs["0.16"]["none"]) < 0.12
    by_warm_up = [median(runs["0.04"][n]) for n in ("linear", "linear, warm-up 2 epochs")]
    assert by_warm_up[1] < 0.7 * by_warm_up[0]
