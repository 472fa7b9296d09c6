"""The checks, in the order of their rows in the table.

A new check is a module here and an entry in this list; base.py says what it needs. A check that
depends on the rows of another one imports it and asks for them: see CheckContext.rows_of.
"""

from enum import unique

from prove.checks import (
    accumulation,
    augmentation,
    averaged_gradients,
    batch_statistics,
    batches_per_epoch,
    buffers,
    clipping,
    collectives,
    dropout,
    evaluated_model,
    evaluation,
    files,
    finite_gradients,
    finite_loss,
    forward_through_ddp,
    hang,
    learning_rate_by_rank,
    loss_scale,
    one_data_set,
    optimizer,
    order_of_an_epoch,
    printing,
    samples,
    unused_parameters,
    weights,
    workers,
    zero_grad,
    zero_gradients,
)
from prove.checks.base import Check, CheckContext, Phase
from prove.judge import replay_reasons  # noqa: F401  sentences that SENTENCES must know, too
from prove.judge.reasons import Reason
from prove.judge.table import ReportRow
from prove.resume import proof  # noqa: F401  and those of --resume

CHECKS: tuple[Check, ...] = (
    unused_parameters.STOPPED,
    hang.CHECK,
    collectives.CHECK,
    files.CHECK,
    printing.CHECK,
    one_data_set.FIELDS,
    samples.CHECK,
    workers.CHECK,
    one_data_set.CONTENTS,
    batches_per_epoch.CHECK,
    order_of_an_epoch.CHECK,
    dropout.CHECK,
    augmentation.CHECK,
    evaluation.CHECK,
    clipping.CHECK,
    zero_gradients.CHECK,
    optimizer.CHECK,
    accumulation.CHECK,
    finite_loss.CHECK,
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
)


def rows_of_phase(phase: Phase, context: CheckContext) -> list[ReportRow]:
    """Return the rows of all checks of a phase."""
    return [row for check in CHECKS if check.phase == phase for row in context.rows_of(check)]


def all_sentences() -> dict[str, Reason]:
    """Index all reasons by name, which is all that JSON stores, so no two may share a name."""
    named: dict[str, Reason] = {}
    for kind in Reason.__subclasses__():
        for reason in unique(kind):  # an Enum would silently merge two equal sentences
            if named.setdefault(reason.name, reason) is not reason:
                raise ValueError(f"two sentences have the name {reason.name}")
    return named


SENTENCES = all_sentences()
