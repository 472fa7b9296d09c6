"""Does each parameter get a gradient on all ranks? Otherwise DDP may raise an error."""

import re

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.judge.rank_exits import error_is
from prove.judge.rank_steps import parameter_names
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WARNING, ReportRow, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import DDPRecord

NAME = "unused parameters"
REDUCTION_STOPPED = re.compile("Expected to have finished reduction in the prior iteration")


class Sentence(Reason):
    REDUCTION_UNFINISHED = (
        "on rank {ranks}, some parameters got no gradient in the step before{names}, so DDP stops "
        "it after {steps:n step} ({at})",
        "let all parameters take part on every rank, also where a batch has no targets "
        "(+ 0 * output.sum()); or find_unused_parameters=True",
        Heading.UNUSED,
    )
    PARAMETERS_UNUSED = (
        "no gradient ever reached {names}",
        "use them, or freeze them",
        Heading.UNUSED,
    )
    PARAMETERS_OF_SOME = (
        "{names} got a gradient on rank {ranks} only (step {step} at {at}): for DDP, it is zero on "
        "the others, and the mean is over all ranks",
        "let all ranks use the same parameters in a step: what is decided for a batch must be "
        "decided alike; meant so if the loss divides by a number of all ranks",
        Heading.LOSS,
    )


def judge_end(context: CheckContext) -> list[ReportRow]:
    """Report that DDP itself raised an error on a rank, because parameters were unused."""
    stopped = [rank for rank in context.records if error_is(rank, REDUCTION_STOPPED)]
    if context.is_alone or not stopped or (error := stopped[0].error) is None:
        return []
    unused = [name for ddp in stopped[0].ddps for name in ddp.not_in_last_step]
    facts = {
        "ranks": [rank.rank for rank in stopped], "steps": stopped[0].step_count,
        "at": error.source_line,
        "names": phrase(" ({names})", names=unused) if unused else phrase(""),
    }  # fmt: skip
    return [wrong(NAME, Sentence.REDUCTION_UNFINISHED, **facts)]


def rows_of(ddp: DDPRecord) -> list[ReportRow]:
    """Report parameters without a gradient in any step; optimizer.py calls it per DDP model."""
    unused = [name for name in ddp.without_gradient if name not in ddp.in_no_optimizer]
    return (
        [warning(NAME, Sentence.PARAMETERS_UNUSED, names=unused)] if unused and ddp.forwards else []
    )


def judge_steps(context: CheckContext) -> list[ReportRow]:
    """Report parameters that have a gradient on some ranks only."""
    for step in context.steps:
        local = step.by_parameter(lambda of_rank: of_rank.local_gradients)
        without = [
            tuple(gradient is None for gradient in ranks_gradients) for ranks_gradients in local
        ]
        mixed = next((ranks for ranks in without if any(ranks) and not all(ranks)), None)
        if mixed:
            numbers = [number for number, ranks in enumerate(without) if ranks == mixed]
            facts = {
                "names": parameter_names(step.optimizer, numbers),
                "ranks": [rank for rank, has_none in enumerate(mixed) if not has_none],
                "step": step.step_number, "at": step.source_line,
            }  # fmt: skip
            return [warning(NAME, Sentence.PARAMETERS_OF_SOME, **facts)]
    return []


PLANTED = (
    plain(
        "parameters that get no gradient", WARNING, NAME,
        (
            "ddp = DDP(build_model())",
            "model = build_model()\n    model[0].spare = nn.Linear(2, 2)\n"
            "    ddp = DDP(model, find_unused_parameters=True)",
        ),
    ),
)  # fmt: skip
STOPPED = Check(NAME, judge_end, Phase.ANY_RUN, planted=PLANTED)
USED_BY_SOME = Check(
    NAME,
    judge_steps,
    Phase.ONE_MODEL,
    moot_if_proven=frozenset({Sentence.PARAMETERS_OF_SOME}),
)
