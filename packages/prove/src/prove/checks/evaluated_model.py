"""Are models that are called but not trained, such as averaged ones, the same on all ranks?

If the trained weights differ, this check is silent: the ranks may just evaluate those.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from prove.checks import weights
from prove.checks.base import Check, CheckContext, Phase
from prove.judge.rank_steps import names_apart
from prove.judge.reasons import Heading, Reason
from prove.judge.table import RIGHT, ReportRow, right, warning
from prove.rank_record import Projection, RankRecord
from prove.watch.model_tensors import is_divided, project, without_wrappers
from prove.watch.rank_run import RankRun, source_line

NAME = "evaluated model"
MAX_EVALUATED_MODULES = 32  # further modules are not recorded


class Sentence(Reason):
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


class EvaluatedModule(NamedTuple):
    """The tensors of an averaged model, a teacher or the like, called but not trained.

    If an optimizer holds the parameters of the module, only its buffers are recorded.
    """

    name: str  # such as "Sequential called at train.py:47"
    source_line: str
    steps_before: int
    tensors: dict[str, Projection]
    buffers: list[str]  # names of the tensors that are buffers


def watch(run: RankRun) -> None:
    evaluated = run.record.notes(EvaluatedModule)
    # For each module, where it was first called, and the number of steps at its last record.
    noted: WeakKeyDictionary[nn.Module, tuple[str, int]] = WeakKeyDictionary()

    def note(module: nn.Module, ddp: int | None) -> None:
        """Record a module after steps 1, 2, 4, ...: a copy may be equal until it is updated."""
        steps = run.record.step_count
        if not steps or (module.training and torch.is_grad_enabled()):
            return
        at, last = noted.get(module, (source_line(), 0))
        if steps < 2 * last or len(evaluated) >= MAX_EVALUATED_MODULES:
            return
        if isinstance(module, nn.parallel.DistributedDataParallel) or is_divided(module):
            return
        noted[module] = (at, steps)
        held = run.models.steps.held_parameters()
        is_trained = any(id(p) in held for p in module.parameters())
        parameters = {} if is_trained else dict(module.named_parameters())
        buffers = {} if ddp is not None or module.training else dict(module.named_buffers())
        tensors = {
            without_wrappers(name): project(tensor)
            for name, tensor in (parameters | buffers).items()
            if tensor.numel()
        }
        if tensors:
            name = f"{type(module).__name__} called at {at}"
            names = [*map(without_wrappers, buffers)]
            evaluated.append(EvaluatedModule(name, at, steps, tensors, names))

    run.events.module_calls.append(note)


def judge(context: CheckContext) -> list[ReportRow]:
    if {*context.verdicts(weights.CHECK)} - {RIGHT}:
        return []
    alike = []
    for ranks_modules in evaluated_by_all(context.records):
        first = ranks_modules[0]
        common, apart = names_apart([own.tensors for own in ranks_modules])
        if apart:
            facts = {
                "module": first.name, "apart": len(apart), "tensors": len(common), "names": apart,
                "steps": first.steps_before, "at": first.source_line,
            }  # fmt: skip
            if {*apart} <= {*first.buffers}:
                return [warning(NAME, Sentence.EVALUATED_BUFFERS_DIFFER, **facts)]
            return [warning(NAME, Sentence.EVALUATED_MODELS_DIFFER, **facts)]
        if common and first.name not in alike:
            alike.append(first.name)
    return [right(NAME, Sentence.EVALUATED_MODELS_ALIKE, modules=alike)] if alike else []


def evaluated_by_all(records: list[RankRecord]) -> list[list[EvaluatedModule]]:
    """List the modules that all ranks call at the same line after equally many steps."""
    by_place: list[dict[tuple, list[EvaluatedModule]]] = []
    for rank in records:
        own: dict[tuple, list[EvaluatedModule]] = {}
        for module in rank.notes(EvaluatedModule):
            own.setdefault((module.name, module.steps_before), []).append(module)
        by_place.append(own)
    return [
        list(ranks_modules)
        for place in by_place[0]
        for ranks_modules in zip(*(own.get(place, []) for own in by_place), strict=False)
    ]


CHECK = Check(NAME, judge, Phase.ONE_MODEL, watch)
