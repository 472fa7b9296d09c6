"""The checks, in the order in which they judge the run of all ranks.

A new check: a module here, and its name in this list. What it needs is in base.py.
"""

from prove.checks import (
    accumulation,
    averaged_gradients,
    batch_statistics,
    buffers,
    clipping,
    collectives,
    evaluated_model,
    files,
    finite_gradients,
    forward_through_ddp,
    hang,
    learning_rate_by_rank,
    loss_scale,
    optimizer,
    printing,
    unused_parameters,
    weights,
    zero_grad,
    zero_gradients,
)
from prove.checks.base import Check, Group, Seen, Stage
from prove.judge import epochs, evaluation, samples
from prove.judge.reasons import Reason
from prove.judge.table import REASONS

CHECKS: tuple[Check | Group, ...] = (
    unused_parameters.STOPPED,
    hang.CHECK,
    collectives.CHECK,
    files.CHECK,
    printing.CHECK,
    Group(
        Stage.ALL_RECORDS,
        {"samples", "one data set", "workers"},
        lambda seen: samples.sample_rows(seen.records),
    ),
    Group(
        Stage.ALL_RECORDS,
        {"batches per epoch", "order of an epoch", "dropout", "augmentation"},
        lambda seen: epochs.epoch_rows(seen.records),
    ),
    Group(Stage.ALL_RECORDS, {"evaluation"}, lambda seen: evaluation.evaluation_rows(seen.records)),
    clipping.CHECK,
    zero_gradients.CHECK,
    optimizer.CHECK,
    accumulation.CHECK,
    finite_gradients.CHECK,
    weights.CHECK,
    averaged_gradients.CHECK,
    zero_grad.CHECK,
    forward_through_ddp.CHECK,
    unused_parameters.USED_BY_SOME,
    learning_rate_by_rank.CHECK,
    loss_scale.CHECK,
    buffers.CHECK,
    batch_statistics.CHECK,
    buffers.OUTSIDE_DDP,
    evaluated_model.CHECK,
)  # fmt: skip


def judge_in_order(stage: Stage, seen: Seen) -> None:
    """Let all checks of a stage add their rows to the table."""
    for check in CHECKS:
        if check.stage == stage:
            seen.rows += check.judge(seen)
            seen.judged |= check.names


def by_name(reasons: list[Reason]) -> dict[str, Reason]:
    """JSON has no more of a sentence than its name, so no two checks may have one in common."""
    named = {reason.name: reason for reason in reasons}
    if len({*map(id, named.values())}) < len({*map(id, reasons)}):
        raise ValueError("two sentences have one name")
    return named


SENTENCES = by_name([*REASONS.values(), *(reason for check in CHECKS for reason in check.says)])
