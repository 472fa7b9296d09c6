"""Are the gradients cleared before each step?"""

from prove.checks import averaged_gradients
from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.judge.rank_steps import steps_with_old_gradients
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WRONG, ReportRow, wrong

NAME = "zero_grad"


class Sentence(Reason):
    GRADIENTS_KEPT = (
        "at {steps} steps, p.grad still held the gradient of the step before ({at})",
        "optimizer.zero_grad() in each step",
        Heading.NAN,
    )


def judge(context: CheckContext) -> list[ReportRow]:
    """Stay silent if averaged_gradients.py already has a row, which is more precise."""
    kept = steps_with_old_gradients(context.steps)
    if not kept or context.rows_of(averaged_gradients.CHECK):
        return []
    return [
        wrong(
            NAME,
            Sentence.GRADIENTS_KEPT,
            steps=len(kept),
            step=kept[0].step_number,
            at=kept[0].source_line,
        )
    ]


PLANTED = (
    plain(
        "no zero_grad", WRONG, NAME,
        ("            optimizer.zero_grad()\n", ""),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ONE_MODEL, planted=PLANTED)
