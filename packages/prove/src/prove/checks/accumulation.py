"""Do the gradients of several backwards add up to one step, though no loss was divided?"""

from prove.checks.base import Check, Phase, Seen
from prove.checks.mistake import accumulate
from prove.judge.reasons import Reason
from prove.judge.table import WARNING, ReportRow, warning

NAME = "accumulation"


class Says(Reason):
    LOSS_NOT_DIVIDED = (
        "{backwards} backwards at {at} add up, and the loss is not divided",
        "loss / {backwards}; meant so only if the loss is a sum, or the rate is divided",
    )


def judge(seen: Seen) -> list[ReportRow]:
    """Look at the first step: what comes before it in one line, and divides nowhere."""
    first = seen.records[0]
    backwards = [backward for backward in first.backwards if backward.steps_before == 0]
    places = {backward.at for backward in backwards}
    n = min(len(backwards), 1 + sum(backward.adds_up for backward in backwards))
    if n < 2 or len(places) > 1 or len(first.optimizers) != 1:
        return []
    if any(backward.is_scaled for backward in backwards):
        return []
    return [warning(NAME, Says.LOSS_NOT_DIVIDED, backwards=n, at=places.pop())]


PLANTED = (
    accumulate(
        "accumulation is not divided", WARNING, NAME,
        (
            "                        ignore_index=PADDING,\n"
            '                        reduction="sum",\n',
            "",
        ),
        ("(loss * world_size / words).backward()", "loss.backward()"),
    ),
)  # fmt: skip
CHECK = Check(NAME, Says, judge, Phase.STEPS, planted=PLANTED)
