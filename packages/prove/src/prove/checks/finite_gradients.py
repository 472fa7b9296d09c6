"""Are all gradients finite? NaN and infinity would pass as nonzero, and compare with nothing."""

import math

from prove.checks.base import Check, CheckContext, Phase
from prove.judge.reasons import Heading, Reason
from prove.judge.table import ReportRow, warning

NAME = "finite gradients"


class Sentence(Reason):
    GRADIENTS_NOT_FINITE = (
        "the gradients of {steps:n step} are not finite, first those of step {step} ({at}, ranks "
        "{ranks}): such numbers cannot be compared",
        "find the batch: torch.autograd.set_detect_anomaly(True); and all ranks must leave out "
        "the same step",
        Heading.NAN,
    )


def judge(context: CheckContext) -> list[ReportRow]:
    bad: dict[int, list[int]] = {}  # ranks by number of the step
    places: dict[int, str] = {}
    for rank in context.records:
        for optimizer in rank.optimizers:
            for number, step in enumerate(optimizer.steps, start=1):
                norms = [gradient[1] for gradient in step.gradients if gradient]
                if not all(map(math.isfinite, norms)):
                    bad.setdefault(number, []).append(rank.rank)
                    places.setdefault(number, step.source_line)
    if not bad:
        return []
    first = min(bad)
    facts = {"steps": len(bad), "step": first, "at": places[first], "ranks": sorted({*bad[first]})}
    return [warning(NAME, Sentence.GRADIENTS_NOT_FINITE, **facts)]


CHECK = Check(NAME, judge, Phase.STEPS)
