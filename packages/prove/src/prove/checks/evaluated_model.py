"""Are models the same on all ranks that are called without being trained: averaged ones, teachers?

Where the weights differ that are trained, the ranks may just evaluate those.
"""

from prove.checks import weights
from prove.checks.base import Check, Phase, Seen
from prove.judge.reasons import Heading, Reason
from prove.judge.steps import names_apart
from prove.judge.table import RIGHT, ReportRow, right, warning
from prove.rank_record import EvaluatedModule, RankRecord

NAME = "evaluated model"


class Says(Reason):
    EVALUATED_MODELS_DIFFER = (
        "{module} is not the same on all ranks: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "update a copy of the model on every rank, or broadcast it before it is evaluated; meant "
        "so only if each rank has a model of its own",
        Heading.BUFFERS,
    )
    EVALUATED_BUFFERS_DIFFER = (
        "{module} has other buffers on each rank: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        Heading.BUFFERS,
    )
    EVALUATED_MODELS_ALIKE = "{modules}: the same on all ranks"


def judge(seen: Seen) -> list[ReportRow]:
    if {*seen.verdicts(weights.CHECK)} - {RIGHT}:
        return []
    alike = []
    for ranks_modules in evaluated_by_all(seen.records):
        first = ranks_modules[0]
        common, apart = names_apart([own.tensors for own in ranks_modules])
        if apart:
            facts = {
                "module": first.name, "apart": len(apart), "tensors": len(common), "names": apart,
                "steps": first.steps_before,
            }  # fmt: skip
            if {*apart} <= {*first.buffers}:
                return [warning(NAME, Says.EVALUATED_BUFFERS_DIFFER, **facts)]
            return [warning(NAME, Says.EVALUATED_MODELS_DIFFER, **facts)]
        if common and first.name not in alike:
            alike.append(first.name)
    return [right(NAME, Says.EVALUATED_MODELS_ALIKE, modules=alike)] if alike else []


def evaluated_by_all(records: list[RankRecord]) -> list[list[EvaluatedModule]]:
    """Each module that all ranks call at the same place after as many steps."""
    by_place: list[dict[tuple, list[EvaluatedModule]]] = []
    for rank in records:
        own: dict[tuple, list[EvaluatedModule]] = {}
        for module in rank.evaluated:
            own.setdefault((module.name, module.steps_before), []).append(module)
        by_place.append(own)
    return [
        list(ranks_modules)
        for place in by_place[0]
        for ranks_modules in zip(*(own.get(place, []) for own in by_place), strict=False)
    ]


CHECK = Check(NAME, Says, judge, Phase.ONE_MODEL)
