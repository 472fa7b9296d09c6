"""Is every gradient of every step zero, so that nothing is trained?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import LOSS, plain
from prove.judge.reasons import Reason
from prove.judge.table import WRONG, ReportRow, wrong

NAME = "zero gradients"


class Sentence(Reason):
    ZERO_GRADIENTS = (
        "all gradients are exactly zero in all steps ({at})",
        "the loss does not depend on the weights: is it a cross-entropy over one class?",
    )


def judge(context: CheckContext) -> list[ReportRow]:
    optimizers = [optimizer for rank in context.records for optimizer in rank.optimizers]
    steps = [step for optimizer in optimizers for step in optimizer.steps]
    norms = [gradient[1] for step in steps for gradient in step.gradients if gradient]
    if not norms or any(norm != 0 for norm in norms):  # NaN counts as nonzero
        return []
    return [wrong(NAME, Sentence.ZERO_GRADIENTS, at=steps[0].source_line)]


PLANTED = (
    plain(
        "cross-entropy over one class", WRONG, NAME,
        (LOSS, "F.cross_entropy(ddp(points)[:, :1], torch.zeros_like(labels))"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.STEPS, planted=PLANTED)
