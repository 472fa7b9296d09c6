"""Do the ranks wait for each other for ever, or until one ends and the others lose it?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.collectives import ALL_CALL, first_difference, missed_call
from prove.checks.mistake import amp, plain
from prove.judge.rank_exits import state_of, wait_for_ever
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WRONG, ReportRow, wrong

NAME = "hang"


class Sentence(Reason):
    HANG = ("{ranks:; }", f"{ALL_CALL}; and each recv its send", Heading.HANG)
    HANG_BY_DIFFERENCE = ("{ranks:; }. The first difference: {difference}", ALL_CALL, Heading.HANG)


def judge(context: CheckContext) -> list[ReportRow]:
    if context.is_alone or not wait_for_ever(context.outcome):
        return []
    ranks = [state_of(rank, context.outcome.hang) for rank in context.records]
    calls = [rank.collectives for rank in context.records]
    if difference := first_difference(calls) or missed_call(context.records, calls):
        return [wrong(NAME, Sentence.HANG_BY_DIFFERENCE, ranks=ranks, difference=difference)]
    return [wrong(NAME, Sentence.HANG, ranks=ranks)]


PLANTED = (
    plain(
        "a barrier that only rank 0 reaches", WRONG, NAME,
        ("        if rank == 0:\n", "        if rank == 0:\n            dist.barrier()\n"),
    ),
    plain(
        "collectives in another order", WRONG, NAME,
        (
            "        dist.all_reduce(total)\n",
            "        if rank == 0:\n"
            "            dist.broadcast(total, 0)\n"
            "        dist.all_reduce(total)\n"
            "        if rank > 0:\n"
            "            dist.broadcast(total, 0)\n",
        ),
    ),
    amp(
        "a rank stops early by itself", WRONG, NAME,
        (
            "        dist.barrier()\n",
            "        dist.barrier()\n        if rank == 1:\n            break\n",
        ),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ANY_RUN, planted=PLANTED)
