"""Do all ranks print the same lines while they train, apart from the numbers in them?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WARNING, ReportRow, warning
from prove.judge.wording import NUMBER, phrase
from prove.rank_record import RankRecord

NAME = "printing"


class Sentence(Reason):
    PRINTED_BY_ALL = (
        "all ranks print {lines}",
        "if dist.get_rank() == 0; meant so only if each rank reports on itself",
        Heading.PRINTS,
    )


def judge(context: CheckContext) -> list[ReportRow]:
    if context.is_alone:
        return []
    common = set.intersection(*(set(lines_of(rank)) for rank in context.records))
    if not common:
        return []
    places = dict(line for line in reversed(lines_of(context.records[0])) if line in common)
    lines = [
        phrase('"{text}" ({at})', text=text[:50], at=at) for at, text in sorted(places.items())
    ]
    return [warning(NAME, Sentence.PRINTED_BY_ALL, lines=lines)]


def lines_of(rank: RankRecord) -> list[tuple[str, str]]:
    """Return the source line and the text without numbers of each printed line."""
    lines = [line for line in rank.printed if line.steps_before and line.on_terminal]
    return [(line.source_line, NUMBER.sub("#", line.text)) for line in lines]


PLANTED = (
    plain(
        "all ranks print", WARNING, NAME,
        ("        if rank == 0:\n", "        if rank >= 0:\n"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ANY_RUN, planted=PLANTED)
