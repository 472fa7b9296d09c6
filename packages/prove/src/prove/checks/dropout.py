"""Does dropout draw a different mask on each rank?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.judge.reasons import OWN_SEED, Reason
from prove.judge.table import WARNING, ReportRow, right, warning

NAME = "dropout"


class Sentence(Reason):
    MASKS_DIFFER = "the ranks draw different masks"
    MASKS_ALIKE = (
        "all ranks drop the same positions ({at})",
        f"{OWN_SEED}; no mistake, but less noise than one process has",
    )


def judge(context: CheckContext) -> list[ReportRow]:
    if not context.epochs:
        return []
    for at in sorted(set.intersection(*({*rank.dropout} for rank in context.records))):
        if len({rank.dropout[at] for rank in context.records}) > 1:
            return [right(NAME, Sentence.MASKS_DIFFER)]
        return [warning(NAME, Sentence.MASKS_ALIKE, at=at)]
    return []


PLANTED = (
    plain(
        "the same dropout on all ranks", WARNING, NAME,
        ("torch.manual_seed(rank + 1)", "torch.manual_seed(1)"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ALL_RECORDS, planted=PLANTED)
