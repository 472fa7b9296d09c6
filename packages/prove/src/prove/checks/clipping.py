"""Are gradients clipped as they are, or while they still carry the loss scale?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import amp
from prove.judge.reasons import Reason
from prove.judge.table import WRONG, ReportRow, right, wrong
from prove.rank_record import Flag

NAME = "clipping"


class Sentence(Reason):
    CLIPS_SCALED = (
        "gradients are clipped while they are multiplied by the loss scale ({at})",
        "scaler.unscale_(optimizer) before clipping",
    )
    CLIPS_UNSCALED = "of gradients that are not scaled"


def judge(context: CheckContext) -> list[ReportRow]:
    flags = context.records[0].flags
    if at := flags.get(Flag.CLIPS_SCALED):
        return [wrong(NAME, Sentence.CLIPS_SCALED, at=at)]
    return [right(NAME, Sentence.CLIPS_UNSCALED)] if Flag.CLIPS in flags else []


PLANTED = (
    amp(
        "clips scaled gradients", WRONG, NAME,
        ("            scaler.unscale_(optimizer)\n", ""),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.STEPS, planted=PLANTED)
