"""Does each parameter get a gradient, and on all ranks? Without one, DDP may stop a rank."""

import re

from prove.checks.base import Check, Seen, Stage
from prove.judge.ends import error_is
from prove.judge.reasons import Heading, Reason
from prove.judge.table import ReportRow, wrong
from prove.judge.wording import phrase

NAME = "unused parameters"
REDUCTION_STOPPED = re.compile("Expected to have finished reduction in the prior iteration")


class Says(Reason):
    REDUCTION_UNFINISHED = (
        "on rank {ranks}, some parameters got no gradient in the step before{names}, so DDP stops "
        "it after {steps:n step} ({at})",
        "let all parameters take part on every rank, also where a batch has no targets "
        "(+ 0 * output.sum()); or find_unused_parameters=True",
        Heading.UNUSED,
    )


def judge_end(seen: Seen) -> list[ReportRow]:
    """DDP itself has stopped a rank."""
    stopped = [rank for rank in seen.records if error_is(rank, REDUCTION_STOPPED)]
    if seen.is_alone or not stopped or (error := stopped[0].error) is None:
        return []
    unused = [name for ddp in stopped[0].ddps for name in ddp.not_in_last_step]
    facts = {
        "ranks": [rank.rank for rank in stopped], "steps": stopped[0].steps, "at": error.at,
        "names": phrase(" ({names})", names=unused) if unused else phrase(""),
    }  # fmt: skip
    return [wrong(NAME, Says.REDUCTION_UNFINISHED, **facts)]


STOPPED = Check(NAME, Says, judge_end, Stage.ANY_RUN)
