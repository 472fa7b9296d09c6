"""Do all ranks multiply their loss by the same scale?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import amp
from prove.judge.reasons import Phrase, Reason
from prove.judge.table import WRONG, ReportRow, wrong
from prove.judge.wording import phrase

NAME = "loss scale"


class Sentence(Reason):
    LOSS_SCALES_BY_RANK = (
        "{scales!s} on the ranks {when}",
        "the same GradScaler settings on all ranks",
    )


def judge(context: CheckContext) -> list[ReportRow]:
    for step in context.steps:
        scales = [of_rank.loss_scale for of_rank in step.steps]
        if len({*scales}) > 1:
            when = phrase(Phrase.AT_STEP, step=step.step_number, at=step.source_line)
            return [wrong(NAME, Sentence.LOSS_SCALES_BY_RANK, scales=scales, when=when)]
    return []


PLANTED = (
    amp(
        "the loss scale differs by rank", WRONG, NAME,
        ("init_scale=1024.0", "init_scale=1024.0 * (rank + 1)"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ONE_MODEL, planted=PLANTED)
