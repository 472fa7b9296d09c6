"""Do all ranks end, or evaluate, with the same buffers, such as BatchNorm's running statistics?"""

from dataclasses import dataclass, field

from torch import nn

from prove.checks import weights
from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import amp
from prove.judge.rank_steps import names_apart
from prove.judge.reasons import Heading, Reason
from prove.judge.table import RIGHT, WARNING, ReportRow, right, warning
from prove.judge.wording import phrase
from prove.rank_record import Projection
from prove.watch.model_tensors import is_divided, project_buffers
from prove.watch.rank_run import RankRun

NAME = "buffers"


class Sentence(Reason):
    BUFFERS_DIFFER = (
        "{apart} of {buffers} differ between the ranks at {when}: {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        Heading.BUFFERS,
    )
    BUFFERS_OUTSIDE_DDP = (
        "{module}, which is in no DDP model, has other buffers on each rank at the end of "
        "training: {names}",
        "all_reduce sums and counts of what they are made from; meant so only if each rank keeps "
        "its own on purpose",
        Heading.BUFFERS,
    )
    BUFFERS_ALIKE = "the same on all ranks at {when}"


@dataclass
class Buffers:
    """The buffers of one rank: by number for DDP models, by name for other modules."""

    at_evaluation: dict[int, dict[str, Projection]] = field(default_factory=dict)
    at_end: dict[int, dict[str, Projection]] = field(default_factory=dict)
    outside_ddp: dict[str, dict[str, Projection]] = field(default_factory=dict)


def watch(run: RankRun) -> None:
    buffers = run.record.part(Buffers)

    def note_evaluation(number: int) -> None:
        model, known = run.models.ddps[number].module, buffers.at_evaluation.get(number)
        if not model.training and run.record.step_count and not known:
            buffers.at_evaluation[number] = project_buffers(model)

    def note_call(module: nn.Module, ddp: int | None) -> None:
        """Record at calls around DDP; DDP's own forward first broadcasts rank 0's buffers."""
        if ddp is not None and module is not run.models.ddps[ddp]:
            note_evaluation(ddp)

    def note_end() -> None:
        for number, ddp in enumerate(run.models.ddps):
            buffers.at_end[number] = project_buffers(ddp.module)
        if run.replaying or not run.record.step_count:
            return
        for name, module in run.models.root_modules().items():
            if run.models.number_of_ddp(module) is None and not is_divided(module):
                buffers.outside_ddp[name] = project_buffers(module)

    run.events.module_calls.append(note_call)
    run.events.ddp_forwards.append(note_evaluation)
    run.at_end.append(note_end)


def judge(context: CheckContext) -> list[ReportRow]:
    rows, by_rank = [], [rank.part(Buffers) for rank in context.records]
    for number in range(min(len(own.at_end) for own in by_rank)):
        at_evaluation = [own.at_evaluation.get(number, {}) for own in by_rank]
        evaluated = all(at_evaluation)
        if not evaluated and any(at_evaluation):
            continue  # if only some ranks evaluate, their own buffers are as good as any
        when = phrase("evaluation" if evaluated else "the end")
        at_end = [own.at_end[number] for own in by_rank]
        common, apart = names_apart(at_evaluation if evaluated else at_end)
        if apart:
            facts = {"apart": len(apart), "buffers": len(common), "names": apart, "when": when}
            rows.append(warning(NAME, Sentence.BUFFERS_DIFFER, **facts))
        elif common:
            rows.append(right(NAME, Sentence.BUFFERS_ALIKE, when=when))
    return rows


def judge_outside_ddp(context: CheckContext) -> list[ReportRow]:
    """Compare buffers of modules that train nothing, such as running means of observations."""
    if {*context.verdicts(weights.CHECK)} - {RIGHT}:
        return []
    by_rank = [rank.part(Buffers).outside_ddp for rank in context.records]
    for module in by_rank[0]:
        _, apart = names_apart([own.get(module, {}) for own in by_rank])
        if apart:
            return [warning(NAME, Sentence.BUFFERS_OUTSIDE_DDP, module=module, names=apart)]
    return []


PLANTED = (
    amp(
        "running statistics differ at evaluation", WARNING, NAME,
        ("            dist.broadcast(buffer, src=0)\n", "            pass\n"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ONE_MODEL, watch, planted=PLANTED)
OUTSIDE_DDP = Check(NAME, judge_outside_ddp, Phase.ONE_MODEL)
