"""Does the loss of a rank depend on a statistic, such as a mean, over its own samples alone?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.judge.rank_steps import differing_statistic
from prove.judge.reasons import Heading, Reason
from prove.judge.table import ReportRow, warning
from prove.rank_record import CENTERED

NAME = "batch statistics"
OVER_ALL_RANKS = (
    "take the mean over all ranks: all_reduce sums and counts, then divide; meant so only if each "
    "rank is to be normalized by itself"
)


class Sentence(Reason):
    CENTERED_BY_RANK = (
        "the numbers that each rank makes a tensor of at {at} have mean 0: it has normalized them "
        "by themselves",
        OVER_ALL_RANKS,
        Heading.LOSS,
    )
    STATISTIC_OF_EACH_RANK = (
        "the loss depends on the {name} at {at}, which is that of the samples of each rank: "
        "{values:each .4g}",
        OVER_ALL_RANKS,
        Heading.LOSS,
    )


def judge(context: CheckContext) -> list[ReportRow]:
    """Name the first statistic that differs between the ranks."""
    statistic = differing_statistic(context.records)
    if statistic is None:
        return []
    is_centered = statistic["name"] == CENTERED
    reason = Sentence.CENTERED_BY_RANK if is_centered else Sentence.STATISTIC_OF_EACH_RANK
    return [warning(NAME, reason, **statistic)]


CHECK = Check(NAME, judge, Phase.ONE_MODEL)
