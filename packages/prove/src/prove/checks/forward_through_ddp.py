"""Do the training forwards go through DDP, so that it averages in their backwards?"""

from prove.checks import weights
from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import LOSS, plain
from prove.judge.reasons import Heading, Reason
from prove.judge.table import RIGHT, WRONG, ReportRow, not_seen, right, wrong

NAME = "forward through DDP"


class Sentence(Reason):
    AROUND_DDP = (
        "{around} training forwards go around DDP at {places}, {through} through it",
        "call ddp(x), not ddp.module(x) or model(x)",
        Heading.LOSS,
    )
    THROUGH_DDP = "{forwards:n training forward}"
    NO_DDP = (
        "no DDP",
        "if gradients are averaged by hand, the rows averaged gradients and weights judge it",
    )


def judge(context: CheckContext) -> list[ReportRow]:
    """Report forwards around DDP, but only if the weights differ: otherwise they do no harm."""
    rows, first = [], context.records[0]
    weights_differ = any(verdict != RIGHT for verdict in context.verdicts(weights.CHECK))
    for ddp in first.ddps:
        if ddp.forwards_around and weights_differ:
            facts = {
                "around": sum(ddp.forwards_around.values()), "places": [*ddp.forwards_around],
                "through": ddp.forwards,
            }  # fmt: skip
            rows.append(wrong(NAME, Sentence.AROUND_DDP, **facts))
        elif ddp.forwards:
            rows.append(right(NAME, Sentence.THROUGH_DDP, forwards=ddp.forwards))
    return rows if first.ddps else [not_seen(NAME, Sentence.NO_DDP)]


PLANTED = (
    plain(
        "forward around DDP", WRONG, NAME,
        (LOSS, "F.cross_entropy(ddp.module(points), labels)"),
    ),
)  # fmt: skip
UNEXPLAINED = frozenset({Sentence.AROUND_DDP, Sentence.NO_DDP})
CHECK = Check(NAME, judge, Phase.ONE_MODEL, moot_if_proven=UNEXPLAINED, planted=PLANTED)
