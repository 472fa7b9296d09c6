"""Is the loss a finite number in each backward?

An infinite term without a gradient of its own changes no gradient, so only the loss shows it.
"""

import math
from typing import NamedTuple

import torch

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import LOSS, plain
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WARNING, ReportRow, warning
from prove.watch.rank_run import RankRun, source_line

NAME = "finite loss"
MAX_LOSSES = 64  # further losses are not recorded


class Sentence(Reason):
    LOSS_NOT_FINITE = (
        "the loss is {value} at {at}, first before step {step} (ranks {ranks})",
        "a logarithm of zero, a division by zero or the mean of nothing: look at the terms of the "
        "loss in this batch; meant so only if the script leaves such a step out on all ranks",
        Heading.NAN,
    )


class BadLoss(NamedTuple):
    """A loss of one rank that is not finite."""

    value: str
    source_line: str
    steps_before: int


def watch(run: RankRun) -> None:
    bad = run.record.notes(BadLoss)

    def note(loss: torch.Tensor) -> None:
        # GradScaler skips the step if a scaled float16 loss overflows.
        may_overflow = loss.dtype == torch.float16 and run.record.loss_scale != 1
        is_plain = loss.numel() == 1 and not hasattr(loss, "full_tensor")
        if is_plain and not may_overflow and len(bad) < MAX_LOSSES:
            value = float(loss.detach())
            if not math.isfinite(value):
                bad.append(BadLoss(str(value), source_line(), run.record.step_count))

    run.events.backwards.append(note)


def judge(context: CheckContext) -> list[ReportRow]:
    bad = [(loss, rank.rank) for rank in context.records for loss in rank.notes(BadLoss)]
    if not bad:
        return []
    first, _ = min(bad, key=lambda pair: pair[0].steps_before)
    ranks = sorted({rank for loss, rank in bad if loss.steps_before == first.steps_before})
    facts = {
        "value": first.value,
        "step": first.steps_before + 1,
        "at": first.source_line,
        "ranks": ranks,
    }
    return [warning(NAME, Sentence.LOSS_NOT_FINITE, **facts)]


PLANTED = (
    plain(
        "a term of the loss is the mean of nothing", WARNING, NAME,
        (LOSS, f"{LOSS} + points[labels > 9].mean()"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.STEPS, watch, planted=PLANTED)
