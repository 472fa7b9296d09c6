"""Do all ranks train one model? Weights, gradients and buffers, by their projections."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prove.judge.reasons import Phrase
from prove.judge.run_reasons import RunReason
from prove.judge.table import RIGHT, WARNING, Check, ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import (
    EvaluatedModule,
    Note,
    OptimizerRecord,
    OptimizerStep,
    Projection,
    RankRecord,
)

TINY = 1e-12


@dataclass
class StepOfRanks:
    """The same step of an optimizer, as each of the ranks wrote it down."""

    optimizer: OptimizerRecord
    number: int
    steps: list[OptimizerStep]

    def by_parameter(self, name: str) -> list[tuple]:
        """What the ranks hold: "weights_before", "weights_after", "gradients", ..."""
        return list(zip(*(getattr(step, name) for step in self.steps), strict=True))

    def differing_parameters(self, name: str, limit: float = 1e-5) -> list[int]:
        """The numbers of the parameters for which the ranks hold different tensors."""
        numbered = enumerate(self.by_parameter(name))
        return [number for number, held in numbered if None not in held and differ(held, limit)]

    @property
    def at(self) -> str:
        return self.steps[0].at


def differ(projections: Sequence[Projection], limit: float = 1e-5) -> bool:
    """Whether projections of what should be the same tensor differ."""
    values, norms = zip(*projections, strict=True)
    if not all(map(math.isfinite, norms)):
        return any(map(math.isfinite, norms))
    return bool(max(values) - min(values) > limit * max(TINY, *norms))


def parameter_names(optimizer: OptimizerRecord, numbers: list[int]) -> list[str]:
    return [optimizer.names[number] for number in numbers]


def steps_of(records: list[RankRecord]) -> list[StepOfRanks]:
    steps = []
    for optimizers in zip(*(rank.optimizers for rank in records), strict=False):
        of_ranks = zip(*(optimizer.steps for optimizer in optimizers), strict=False)
        for number, of_each in enumerate(of_ranks, start=1):
            if all(step.weights_after for step in of_each):
                steps.append(StepOfRanks(optimizers[0], number, list(of_each)))
    return steps


def model_is_divided(records: list[RankRecord]) -> bool:
    return not records[0].notes.keys().isdisjoint({Note.HAS_GROUPS, Note.MODEL_IS_DIVIDED})


def model_rows(records: list[RankRecord]) -> list[ReportRow]:
    first, zero = records[0], zero_gradient_rows(records)
    rows = clipping_rows(first) + zero + optimizer_rows(first) + accumulation_rows(first)
    rows += finite_gradient_rows(records)
    if len(records) == 1 or zero:
        return rows
    steps = steps_of(records)
    tensors = [{len(of_rank.weights_before) for of_rank in step.steps} for step in steps]
    if model_is_divided(records) or any(len(counts) > 1 for counts in tensors):  # by ZeRO
        return [*rows, not_seen(Check.WEIGHTS, RunReason.MODEL_IS_DIVIDED)]
    same = weight_rows(steps)
    rows += same + averaged_gradient_rows(steps, same) + forward_rows(first, same)
    rows += learning_rate_rows(records, steps) + metric_rows(records) + loss_scale_rows(steps)
    rows += buffer_rows(records) + statistic_rows(records)
    if all(row.verdict == RIGHT for row in same):  # or they evaluate what they train
        rows += rows_of_buffers_outside_ddp(records) + evaluated_model_rows(records)
    return rows


def weight_rows(steps: list[StepOfRanks]) -> list[ReportRow]:
    check = Check.WEIGHTS
    differing = [step for step in steps if step.differing_parameters("weights_after")]
    if not steps:
        return []
    if not differing:
        return [right(check, RunReason.WEIGHTS_ALIKE, steps=len(steps))]
    step = differing[0]
    apart, optimizer = step.differing_parameters("weights_after"), step.optimizer
    already = step.number == 1 and set(apart) & {*step.differing_parameters("weights_before")}
    after = phrase(Phrase.AFTER_STEP, step=step.number)
    facts = {
        "apart": len(apart), "tensors": len(optimizer.names), "at": step.at,
        "names": parameter_names(optimizer, apart),
        "when": phrase(Phrase.BEFORE_FIRST_STEP) if already else after,
    }  # fmt: skip
    later = steps[steps.index(step) + 1 :]
    if any(not other.differing_parameters("weights_before") for other in later):
        return [warning(check, RunReason.WEIGHTS_AVERAGED_LATER, **facts)]
    outside = [number for number in apart if number in optimizer.outside_ddp]
    if outside and len(optimizer.outside_ddp) < len(optimizer.names):
        names = parameter_names(optimizer, outside)
        return [wrong(check, RunReason.WEIGHTS_OUTSIDE_DDP, outside=names, **facts)]
    return [wrong(check, RunReason.WEIGHTS_DIFFER, **facts)]


def averaged_gradient_rows(
    steps: list[StepOfRanks], rows_of_weights: list[ReportRow]
) -> list[ReportRow]:
    """p.grad at each step: is it the same on all ranks, and the mean of what backward gave them?"""
    check, verdicts = Check.AVERAGED_GRADIENTS, [row.verdict for row in rows_of_weights]
    for step in steps:
        apart = step.differing_parameters("gradients", 1e-4)
        if apart and WARNING in verdicts:
            return [not_seen(check, RunReason.LOCAL_STEPS)]
        if apart and verdicts != [RIGHT]:
            facts = {
                "apart": len(apart), "tensors": len(step.optimizer.names),
                "names": parameter_names(step.optimizer, apart), "step": step.number, "at": step.at,
            }  # fmt: skip
            return [wrong(check, RunReason.GRADIENTS_DIFFER, **facts)]
    old = [
        step
        for step in steps
        if step.number > 1 and all(of_rank.has_old_gradient for of_rank in step.steps)
    ]
    if len(old) > 1:
        return [wrong(Check.ZERO_GRAD, RunReason.GRADIENTS_KEPT, steps=len(old), at=old[0].at)]
    factors = [(times_the_mean(step), step) for step in steps]
    known = [(factor, step) for factor, step in factors if factor is not None]
    if not known:
        return [not_seen(check, RunReason.NO_MULTIPLE_OF_MEAN)]
    factor, step = max(known, key=lambda pair: abs(pair[0] - 1))
    if abs(factor - 1) <= tolerance(step):
        return [right(check, RunReason.MEAN_OF_RANKS, steps=len(known))]
    facts = {"factor": factor, "step": step.number, "at": step.at}
    return [not_seen(check, RunReason.CHANGED_BEFORE_STEP, **facts)]


def tolerance(step: StepOfRanks) -> float:
    return {"torch.float64": 1e-6, "torch.float32": 2e-3}.get(step.steps[0].dtype, 5e-2)


def times_the_mean(step: StepOfRanks) -> float | None:
    """The one factor by which p.grad differs from the mean over the ranks of what backward gave."""
    averaged, local = step.by_parameter("gradients"), step.by_parameter("local_gradients")
    known = []  # of each parameter: p.grad and the mean, both projected, and the norm of p.grad
    for gradients, local_gradients in zip(averaged, local, strict=True):
        if None in gradients or None in local_gradients or gradients[0][1] <= TINY:
            continue
        gradient, norm = gradients[0]
        mean = sum(local_gradients) / len(local_gradients) / step.steps[0].loss_scale
        known.append((gradient, mean, norm))
    sure = sorted(gradient / mean for gradient, mean, norm in known if abs(mean) > 0.05 * norm)
    if not sure:
        return None
    factor, limit = sure[len(sure) // 2], tolerance(step)
    agree = all(abs(gradient - factor * mean) <= limit * norm for gradient, mean, norm in known)
    return factor if agree else None


def forward_rows(first: RankRecord, rows_of_weights: list[ReportRow]) -> list[ReportRow]:
    rows, check = [], Check.FORWARD
    for ddp in first.ddps:
        if ddp.forwards_around and any(row.verdict != RIGHT for row in rows_of_weights):
            facts = {
                "around": sum(ddp.forwards_around.values()), "places": [*ddp.forwards_around],
                "through": ddp.forwards,
            }  # fmt: skip
            rows.append(wrong(check, RunReason.AROUND_DDP, **facts))
        elif ddp.forwards:
            rows.append(right(check, RunReason.THROUGH_DDP, forwards=ddp.forwards))
    if not first.ddps:
        rows.append(not_seen(check, RunReason.NO_DDP))
    return rows


def optimizer_rows(first: RankRecord) -> list[ReportRow]:
    rows, check = [], Check.OPTIMIZER
    for ddp in first.ddps:
        missing, total = ddp.in_no_optimizer, ddp.parameters
        unused = [name for name in ddp.without_gradient if name not in missing]
        if not missing:
            rows.append(right(check, RunReason.PARAMETERS_HELD, parameters=total))
        elif len(missing) == total and ddp.forwards:
            optimizers = [optimizer.at for optimizer in first.optimizers]
            rows.append(wrong(check, RunReason.NO_PARAMETER_HELD, optimizers=optimizers, at=ddp.at))
        else:
            facts = {"missing": len(missing), "parameters": total, "names": missing}
            rows.append(warning(check, RunReason.PARAMETERS_MISSING, **facts))
        if unused and ddp.forwards:
            rows.append(warning(Check.UNUSED_PARAMETERS, RunReason.PARAMETERS_UNUSED, names=unused))
    return rows


def accumulation_rows(first: RankRecord) -> list[ReportRow]:
    """Several backwards before the first step, of a loss that no operation has divided."""
    backwards = [backward for backward in first.backwards if backward.steps_before == 0]
    places, n = {backward.at for backward in backwards}, len(backwards)
    if n < 2 or len(places) > 1 or len(first.optimizers) != 1:
        return []
    if any(backward.is_scaled for backward in backwards):
        return []
    return [warning(Check.ACCUMULATION, RunReason.LOSS_NOT_DIVIDED, backwards=n, at=places.pop())]


def zero_gradient_rows(records: list[RankRecord]) -> list[ReportRow]:
    optimizers = [optimizer for rank in records for optimizer in rank.optimizers]
    steps = [step for optimizer in optimizers for step in optimizer.steps]
    norms = [gradient[1] for step in steps for gradient in step.gradients if gradient]
    if not norms or any(norm != 0 for norm in norms):  # also if it is not a number
        return []
    return [wrong(Check.ZERO_GRADIENTS, RunReason.ZERO_GRADIENTS, at=steps[0].at)]


def finite_gradient_rows(records: list[RankRecord]) -> list[ReportRow]:
    """Infinite ones, or no numbers at all: these are not zero, and not equal to anything."""
    bad: dict[int, list[int]] = {}  # the ranks, by the number of the step
    places: dict[int, str] = {}
    for rank in records:
        for optimizer in rank.optimizers:
            for number, step in enumerate(optimizer.steps, start=1):
                norms = [gradient[1] for gradient in step.gradients if gradient]
                if not all(map(math.isfinite, norms)):
                    bad.setdefault(number, []).append(rank.rank)
                    places.setdefault(number, step.at)
    if not bad:
        return []
    first = min(bad)
    facts = {"steps": len(bad), "step": first, "at": places[first], "ranks": sorted({*bad[first]})}
    return [warning(Check.FINITE_GRADIENTS, RunReason.GRADIENTS_NOT_FINITE, **facts)]


def clipping_rows(first: RankRecord) -> list[ReportRow]:
    if at := first.notes.get(Note.CLIPS_SCALED):
        return [wrong(Check.CLIPPING, RunReason.CLIPS_SCALED, at=at)]
    if Note.CLIPS in first.notes:
        return [right(Check.CLIPPING, RunReason.CLIPS_UNSCALED)]
    return []


def learning_rate_rows(records: list[RankRecord], steps: list[StepOfRanks]) -> list[ReportRow]:
    rates = [
        (
            [of_rank.learning_rates for of_rank in step.steps],
            phrase(Phrase.AT_STEP, step=step.number, at=step.at),
        )
        for step in steps
    ]
    epochs = zip(*(rank.rates_after_epochs for rank in records), strict=False)
    rates += [
        (list(of_ranks), phrase(Phrase.AFTER_EPOCH, epoch=n))
        for n, of_ranks in enumerate(epochs, start=1)
    ]
    for of_ranks, when in rates:
        if any(of_rank != of_ranks[0] for of_rank in of_ranks):
            first_rates = [of_rank[0] for of_rank in of_ranks]
            reason = RunReason.RATES_BY_RANK
            return [wrong(Check.LEARNING_RATE, reason, rates=first_rates, when=when)]
    return []


def metric_rows(records: list[RankRecord]) -> list[ReportRow]:
    """What decides when the rate falls: is it one number for all ranks?"""
    check, number = Check.LEARNING_RATE, 0
    for metrics in zip(*(rank.metrics for rank in records), strict=False):
        values, first = [metric.value for metric in metrics], metrics[0]
        number += 1
        if max(values) - min(values) > 1e-6 * max(map(abs, values)):
            facts = {"values": values, "steps": first.steps_before, "at": first.at}
            return [warning(check, RunReason.METRICS_BY_RANK, **facts)]
    return [right(check, RunReason.METRICS_ALIKE, numbers=number)] if number else []


def loss_scale_rows(steps: list[StepOfRanks]) -> list[ReportRow]:
    for step in steps:
        scales = [of_rank.loss_scale for of_rank in step.steps]
        if len({*scales}) > 1:
            when = phrase(Phrase.AT_STEP, step=step.number, at=step.at)
            return [
                wrong(Check.LOSS_SCALE, RunReason.LOSS_SCALES_BY_RANK, scales=scales, when=when)
            ]
    return []


def buffer_rows(records: list[RankRecord]) -> list[ReportRow]:
    check, rows = Check.BUFFERS, []
    for ddps in zip(*(rank.ddps for rank in records), strict=False):
        evaluated = all(ddp.buffers_at_evaluation for ddp in ddps)
        when = phrase(Phrase.AT_EVALUATION if evaluated else Phrase.AT_THE_END)
        of_ranks = [ddp.buffers_at_evaluation or ddp.buffers_at_end for ddp in ddps]
        names = [name for name in of_ranks[0] if all(name in of_rank for of_rank in of_ranks)]
        apart = [name for name in names if differ([of_rank[name] for of_rank in of_ranks])]
        if apart:
            facts = {"apart": len(apart), "buffers": len(names), "names": apart, "when": when}
            rows.append(warning(check, RunReason.BUFFERS_DIFFER, **facts))
        elif names:
            rows.append(right(check, RunReason.BUFFERS_ALIKE, when=when))
    return rows


def rows_of_buffers_outside_ddp(records: list[RankRecord]) -> list[ReportRow]:
    """Such as running means of observations; of modules without parameters that are trained."""
    for module, first in records[0].buffers_outside_ddp.items():
        of_ranks = [rank.buffers_outside_ddp.get(module, {}) for rank in records]
        names = [name for name in first if all(name in own for own in of_ranks)]
        if apart := [name for name in names if differ([own[name] for own in of_ranks])]:
            facts = {"module": module, "names": apart}
            return [warning(Check.BUFFERS, RunReason.BUFFERS_OUTSIDE_DDP, **facts)]
    return []


def statistic_rows(records: list[RankRecord]) -> list[ReportRow]:
    """Means and the like over the samples of one rank that its loss depends on; the first."""
    statistic = differing_statistic(records)
    if statistic is None:
        return []
    return [warning(Check.BATCH_STATISTICS, RunReason.STATISTICS_BY_RANK, **statistic)]


def differing_statistic(records: list[RankRecord]) -> dict[str, Any] | None:
    numbers = [{each.tag: each.value for each in rank.statistics} for rank in records]
    for each in records[0].statistics:
        values = [own[each.tag] for own in numbers if each.tag in own]
        if len(values) == len(records) and max(values) - min(values) > 1e-6 * max(map(abs, values)):
            return {"name": each.name, "at": each.at, "values": values}
    return None


def evaluated_model_rows(records: list[RankRecord]) -> list[ReportRow]:
    """Models outside DDP that are called without being trained: averaged ones, teachers."""
    check, alike = Check.EVALUATED_MODEL, []
    for of_ranks in evaluated_by_all(records):
        first = of_ranks[0]
        names = [name for name in first.tensors if all(name in own.tensors for own in of_ranks)]
        apart = [name for name in names if differ([own.tensors[name] for own in of_ranks])]
        if apart:
            facts = {
                "module": first.name, "apart": len(apart), "tensors": len(names), "names": apart,
                "steps": first.steps_before,
            }  # fmt: skip
            if {*apart} <= {*first.buffers}:
                return [warning(check, RunReason.EVALUATED_BUFFERS_DIFFER, **facts)]
            return [warning(check, RunReason.EVALUATED_MODELS_DIFFER, **facts)]
        if names and first.name not in alike:
            alike.append(first.name)
    return [right(check, RunReason.EVALUATED_MODELS_ALIKE, modules=alike)] if alike else []


def evaluated_by_all(records: list[RankRecord]) -> list[list[EvaluatedModule]]:
    """Each module that all ranks call at the same place after as many steps."""
    by_place: list[dict[tuple, list[EvaluatedModule]]] = []
    for rank in records:
        own: dict[tuple, list[EvaluatedModule]] = {}
        for module in rank.evaluated:
            own.setdefault((module.name, module.steps_before), []).append(module)
        by_place.append(own)
    return [
        list(of_ranks)
        for place in by_place[0]
        for of_ranks in zip(*(own.get(place, []) for own in by_place), strict=False)
    ]
