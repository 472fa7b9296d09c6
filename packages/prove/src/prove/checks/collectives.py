"""Do all ranks call the same collectives, in the same order?

If they wait for ever after that, hang.py reports it.
"""

from typing import Any

from prove.checks.base import Check, CheckContext, Phase
from prove.judge.rank_exits import ends_with_others, wait_for_ever
from prove.judge.reasons import Heading, Reason
from prove.judge.table import ReportRow, right, wrong
from prove.judge.wording import phrase
from prove.rank_record import Collective, Ended, Flag, RankRecord

NAME = "collectives"
ALL_CALL = "every rank must reach each collective the same number of times, in the same order"


class Sentence(Reason):
    COLLECTIVES_DIFFER = ("{difference}", ALL_CALL, Heading.HANG)
    COLLECTIVES_ALIKE = "{calls:n call}, the same on all ranks"


def judge(context: CheckContext) -> list[ReportRow]:
    if context.is_alone or wait_for_ever(context.outcome):
        return []
    records = context.records
    # DDP's own calls do not count: if the run ends well, one more call of a DDP model did no harm.
    calls = [[call for call in rank.collectives if not call.is_of_ddp] for rank in records]
    have_ended = all(rank.ended.is_well for rank in records)
    is_whole = have_ended and not any(map(ends_with_others, records))
    difference = first_difference(calls) or (missed_call(records, calls) if is_whole else None)
    if difference:
        return [wrong(NAME, Sentence.COLLECTIVES_DIFFER, difference=difference)]
    return [right(NAME, Sentence.COLLECTIVES_ALIKE, calls=len(calls[0]))]


def first_difference(calls: list[list[Collective]]) -> dict[str, Any] | None:
    """Find the first collective that is not the same on all ranks."""
    for parts in zip(*calls, strict=False):
        if len({call.name for call in parts}) > 1:
            different = [
                phrase(
                    "rank {rank} calls {name} at {at}",
                    rank=rank,
                    name=call.name,
                    at=call.source_line,
                )
                for rank, call in enumerate(parts)
            ]
            return phrase("{calls:; }", calls=different)
    return None


def missed_call(records: list[RankRecord], calls: list[list[Collective]]) -> dict[str, Any] | None:
    """Find a call that some ranks never make, if all have ended or wait for ever."""
    fewest, most = min(calls, key=len), max(calls, key=len)
    if len(fewest) == len(most):
        steps = [rank.step_count for rank in records]
        all_known = all(rank.ended != Ended.NOT_YET for rank in records)
        joins = Flag.JOINS in records[0].flags
        is_unequal = all_known and len({*steps}) > 1 and not joins
        return phrase("the ranks have made {steps!s} steps", steps=steps) if is_unequal else None
    call = most[len(fewest)]
    others = [rank for rank, of_rank in enumerate(calls) if len(of_rank) == len(fewest)]
    facts = {"rank": calls.index(most), "name": call.name, "at": call.source_line, "others": others}
    return phrase("rank {rank} calls {name} at {at}, which rank {others} does not reach", **facts)


CHECK = Check(NAME, judge, Phase.ANY_RUN)
