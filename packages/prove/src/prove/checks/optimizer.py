"""Does an optimizer hold the parameters of each model that DDP wraps?"""

from prove.checks import unused_parameters
from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.judge.reasons import Reason
from prove.judge.table import WARNING, WRONG, ReportRow, right, warning, wrong
from prove.rank_record import DDPRecord, RankRecord

NAME = "optimizer"


class Sentence(Reason):
    PARAMETERS_HELD = "it holds the {parameters} parameters of the model"
    NO_PARAMETER_HELD = (
        "no optimizer ({optimizers}) holds a parameter of the model that DDP wraps at {at}",
        "make the optimizer from ddp.parameters(), after wrapping",
    )
    PARAMETERS_MISSING = (
        "{missing} of {parameters} parameters are in no optimizer: {names}",
        "add them, or requires_grad_(False)",
    )


def judge(context: CheckContext) -> list[ReportRow]:
    """Judge each DDP model, followed by its row of unused_parameters.py."""
    first = context.records[0]
    rows = []
    for ddp in first.ddps:
        rows += [row_of(ddp, first), *unused_parameters.rows_of(ddp)]
    return rows


def row_of(ddp: DDPRecord, rank: RankRecord) -> ReportRow:
    missing, total = ddp.in_no_optimizer, ddp.parameters
    if not missing:
        return right(NAME, Sentence.PARAMETERS_HELD, parameters=total)
    if len(missing) == total and ddp.forwards:
        optimizers = [optimizer.source_line for optimizer in rank.optimizers]
        return wrong(NAME, Sentence.NO_PARAMETER_HELD, optimizers=optimizers, at=ddp.source_line)
    facts = {"missing": len(missing), "parameters": total, "names": missing}
    return warning(NAME, Sentence.PARAMETERS_MISSING, **facts)


PLANTED = (
    plain(
        "the optimizer holds another model", WRONG, NAME,
        ("SGD(ddp.parameters()", "SGD(build_model().parameters()"),
    ),
    plain(
        "parameters in no optimizer", WARNING, NAME,
        ("SGD(ddp.parameters()", "SGD(ddp.module[0].parameters()"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.STEPS, planted=PLANTED)
