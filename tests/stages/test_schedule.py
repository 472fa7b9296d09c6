"""The learning rate of every step, and what the rules for large batches make up for."""

import math

import pytest

import schedule
from common.options import make_parser
from helpers.outputs import rows_on_page

ALL_THREE = ("--lr-decay=cosine", "--warmup-epochs=1", "--lr-rule=linear", "--base-batch-size=240")
RATES = {
    ("--lr-rule=linear", "--base-batch-size=30"): [4.0] * 24,
    ("--lr-rule=sqrt", "--base-batch-size=30"): [2.0] * 24,
    ("--base-batch-size=1",): [1.0] * 24,
    ("--warmup-epochs=0.5",): [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6] + [1.0] * 19,
    ("--warmup-epochs=9",): [(n + 1) / 108 for n in range(24)],
    ("--warmup-epochs=1.9", "--lr-decay=cosine"): [min(1, (n + 1) / 22.8) for n in range(23)]
    + [math.cos(math.pi / 12) ** 2],
    ("--lr-decay=step",): [1.0] * 8 + [0.1] * 8 + [0.01] * 8,
    ALL_THREE: [0.5 * (n + 1) / 12 for n in range(12)]
    + [0.5 * math.cos(math.pi * n / 24) ** 2 for n in range(12)],
}


@pytest.mark.parametrize("flags", RATES, ids=" ".join)
def test_the_learning_rate_of_every_step_follows_the_rule_the_warmup_and_the_decay(flags):
    schedule.add_schedule(parser := make_parser("", ""))
    args = parser.parse_args(["--epochs=2", *flags])
    rates = [rate for epoch in range(2) for rate in schedule.learning_rates(args, epoch, 12)]
    assert rates == pytest.approx([0.02 * factor for factor in RATES[flags]], rel=1e-9)


def test_05_the_linear_rule_makes_up_for_fewer_updates_until_it_diverges():
    losses = {
        " ".join(row[2:-1]): row[-1]
        for row in rows_on_page("05_amp_syncbn/large_batch.py")
        if row[1:]
    }
    small, large = float(losses["0.05"]), float(losses["none 0.05"])
    assert large > 2 * small
    assert max(float(losses["sqrt 0.14"]), float(losses["linear 0.40"])) < large / 1.5
    assert (losses["linear 1.60"], losses["linear 1.60 2"]) == ("diverged", "unsteady")
    assert float(losses["none 0.20"]) < 0.1


def test_05_a_rate_that_is_kept_while_the_batch_shrinks_diverges_unless_it_is_divided():
    rows = rows_on_page("05_amp_syncbn/large_batch.py")
    divided = {row[2]: row[-1] for row in rows if row[1:2] == ["÷"]}
    assert ["30", "kept", "0.40", "diverged"] in rows, "the control"
    assert float(divided["8"]) < float(divided["√8"]) < 0.1
