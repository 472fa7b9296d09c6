"""Do all ranks end, or evaluate, with the same buffers, such as BatchNorm's running statistics?"""

from prove.checks import weights
from prove.checks.base import Check, Phase, Seen
from prove.checks.mistake import amp
from prove.judge.reasons import Heading, Reason
from prove.judge.steps import names_apart
from prove.judge.table import RIGHT, WARNING, ReportRow, right, warning
from prove.judge.wording import phrase

NAME = "buffers"


class Says(Reason):
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


def judge(seen: Seen) -> list[ReportRow]:
    rows = []
    for ddps in zip(*(rank.ddps for rank in seen.records), strict=False):
        evaluated = all(ddp.buffers_at_evaluation for ddp in ddps)
        if not evaluated and any(ddp.buffers_at_evaluation for ddp in ddps):
            continue  # only some ranks evaluate, with their own: as good as those of any rank
        when = phrase("evaluation" if evaluated else "the end")
        common, apart = names_apart(
            [ddp.buffers_at_evaluation or ddp.buffers_at_end for ddp in ddps]
        )
        if apart:
            facts = {"apart": len(apart), "buffers": len(common), "names": apart, "when": when}
            rows.append(warning(NAME, Says.BUFFERS_DIFFER, **facts))
        elif common:
            rows.append(right(NAME, Says.BUFFERS_ALIKE, when=when))
    return rows


def judge_outside_ddp(seen: Seen) -> list[ReportRow]:
    """Compare buffers of modules that train nothing, such as running means of observations."""
    if {*seen.verdicts(weights.CHECK)} - {RIGHT}:
        return []
    for module in seen.records[0].buffers_outside_ddp:
        _, apart = names_apart([rank.buffers_outside_ddp.get(module, {}) for rank in seen.records])
        if apart:
            return [warning(NAME, Says.BUFFERS_OUTSIDE_DDP, module=module, names=apart)]
    return []


PLANTED = (
    amp(
        "running statistics differ at evaluation", WARNING, NAME,
        ("            dist.broadcast(buffer, src=0)\n", "            pass\n"),
    ),
)  # fmt: skip
CHECK = Check(NAME, Says, judge, Phase.ONE_MODEL, planted=PLANTED)
OUTSIDE_DDP = Check(NAME, Says, judge_outside_ddp, Phase.ONE_MODEL)
