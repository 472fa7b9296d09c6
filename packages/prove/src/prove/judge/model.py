"""Do all ranks train one model? Weights, gradients and buffers, by their projections."""

from itertools import combinations
from typing import NamedTuple

import torch

from prove.judge.reasons import Phrase
from prove.judge.run_reasons import RunReason
from prove.judge.steps import TINY, StepOfRanks, differ, parameter_names
from prove.judge.table import RIGHT, WARNING, Check, ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import Note, Projection, RankRecord

TOLERANCES = {"torch.float64": 1e-6, "torch.complex128": 1e-6}
TOLERANCES |= {"torch.float32": 2e-3, "torch.complex64": 2e-3}
MOST_RANKS = 8  # of which every choice is tried


def rows_of_divided_model() -> list[ReportRow]:
    return [not_seen(Check.WEIGHTS, RunReason.MODEL_IS_DIVIDED)]


class HeldWeights(NamedTuple):
    """What the ranks hold of one parameter after so many steps of the run, as time goes by."""

    name: str
    in_ddp: bool
    at: str  # of its first step
    held: list[tuple[int, tuple[Projection, ...]]]
    unfrozen: str = ""  # where the DDP was made that found it frozen, and so does not average it

    @property
    def differs_at(self) -> list[int]:
        return [steps for steps, of_ranks in self.held if differ(of_ranks)]

    @property
    def agrees_later(self) -> bool:
        first = self.differs_at[0]
        return any(steps > first and not differ(of_ranks) for steps, of_ranks in self.held)

    @property
    def moved(self) -> bool:
        """On some rank."""
        return any(differ(of_rank) for of_rank in zip(*(own for _, own in self.held), strict=True))


def held_weights(records: list[RankRecord], steps: list[StepOfRanks]) -> list[HeldWeights]:
    """Between two batches, of each parameter of a trained module; if none of these moves, after
    each step, of what the optimizers hold."""
    places = {key: step.at for step in reversed(steps) for key in step.optimizer.keys}
    in_ddp = {key for ddp in records[0].ddps for key in ddp.keys}
    unfrozen = unfrozen_parameters(records[0])
    common = sorted(set.intersection(*({*rank.weights} for rank in records)))
    weights = {}
    for key in dict.fromkeys(key for count in common for key in records[0].weights[count]):
        held = [
            (count, tuple(rank.weights[count][key] for rank in records))
            for count in common
            if all(key in rank.weights[count] for rank in records)
        ]
        if len(held) > 1:
            name = key.partition(": ")[2]
            at, frozen_at = places.get(key, ""), unfrozen.get(key, "")
            weights[key] = HeldWeights(name, key in in_ddp, at, held, frozen_at)
    if any(each.moved for each in weights.values()):
        return [*weights.values()]  # beside these, a rank may hold its part of the masters
    return [*weights.values(), *held_by_optimizers(steps, {*weights})]


def unfrozen_parameters(first: RankRecord) -> dict[str, str]:
    """Where the DDP was made that found each of them frozen, by their keys."""
    return {key: ddp.at for ddp in first.ddps for key in ddp.unfrozen}


def held_by_optimizers(steps: list[StepOfRanks], known: set[str]) -> list[HeldWeights]:
    """Of parameters that are none of `known`."""
    found: dict[tuple[int, int], HeldWeights] = {}
    for step in steps:
        optimizer = step.optimizer
        after, before = step.by_parameter("weights_after"), step.by_parameter("weights_before")
        for number, name in enumerate(optimizer.names):
            if optimizer.keys[number] in known:
                continue
            begin = [(step.number - 1, before[number])]
            fresh = HeldWeights(name, number not in optimizer.outside_ddp, step.at, begin)
            own = found.setdefault((id(optimizer), number), fresh)
            own.held.append((step.number, after[number]))
    return list(found.values())


def weight_rows(records: list[RankRecord], steps: list[StepOfRanks]) -> list[ReportRow]:
    check = Check.WEIGHTS
    if not steps:
        return []
    weights = [each for each in held_weights(records, steps) if each.moved or each.at]
    differing = [each for each in weights if each.differs_at]
    if not differing:
        return [right(check, RunReason.WEIGHTS_ALIKE, steps=len(steps))]
    for_good = [each for each in differing if not each.agrees_later]
    shown = for_good or differing
    first = min(each.differs_at[0] for each in shown)
    shown = [each for each in shown if each.differs_at[0] == first]
    after = phrase(Phrase.AFTER_STEP, step=first)
    facts = {
        "apart": len(shown), "tensors": len(weights), "at": shown[0].at, "step": first,
        "names": [each.name for each in shown],
        "when": after if first else phrase(Phrase.BEFORE_FIRST_STEP),
    }  # fmt: skip
    if not for_good:
        return [warning(check, RunReason.WEIGHTS_AVERAGED_LATER, **facts)]
    if all(each.unfrozen for each in shown):
        return [wrong(check, RunReason.WEIGHTS_UNFROZEN, wrapped_at=shown[0].unfrozen, **facts)]
    outside = [each.name for each in shown if not each.in_ddp]
    if outside and any(each.in_ddp for each in weights):
        return [wrong(check, RunReason.WEIGHTS_OUTSIDE_DDP, outside=outside, **facts)]
    return [wrong(check, RunReason.WEIGHTS_DIFFER, **facts)]


def averaged_gradient_rows(
    first: RankRecord, steps: list[StepOfRanks], rows_of_weights: list[ReportRow]
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
            unfrozen = unfrozen_parameters(first)
            made_at = [unfrozen.get(step.optimizer.keys[number]) for number in apart]
            if all(made_at):
                facts["wrapped_at"] = made_at[0]
                return [wrong(check, RunReason.GRADIENTS_UNFROZEN, **facts)]
            return [wrong(check, RunReason.GRADIENTS_DIFFER, **facts)]
    lost = [step for step in steps if any(of_rank.lost_imaginary for of_rank in step.steps)]
    if lost:
        numbers = {n for of_rank in lost[0].steps for n in of_rank.lost_imaginary}
        names = parameter_names(lost[0].optimizer, sorted(numbers))
        facts = {"names": names, "step": lost[0].number, "at": lost[0].at}
        return [wrong(check, RunReason.IMAGINARY_LOST, **facts)]
    old = [
        step
        for step in steps
        if step.number > 1 and all(of_rank.has_old_gradient for of_rank in step.steps)
    ]
    if len(old) > 1:
        facts = {"steps": len(old), "step": old[0].number, "at": old[0].at}
        return [wrong(Check.ZERO_GRAD, RunReason.GRADIENTS_KEPT, **facts)]
    factors = [(times_the_mean(step), step) for step in steps]
    known = [(factor, step) for factor, step in factors if factor is not None]
    if row := next((row for step in steps if (row := row_of_some_ranks(step))), None):
        return [row]
    clips_at = first.notes.get(Note.CLIPS)
    if not known and clips_at:
        return [not_seen(check, RunReason.CLIPPED_APART, at=clips_at)]
    if not known:
        return [not_seen(check, RunReason.NO_MULTIPLE_OF_MEAN)]
    factor, step = max(known, key=lambda pair: abs(pair[0] - 1))
    if abs(factor - 1) <= tolerance(step):
        return [right(check, RunReason.MEAN_OF_RANKS, steps=len(known))]
    facts, ranks = {"factor": factor, "step": step.number, "at": step.at}, len(step.steps)
    if abs(factor - ranks) <= ranks * tolerance(step):
        return [not_seen(check, RunReason.SUM_OF_RANKS, **facts)]
    clips = factor < 1 and clips_at
    reason = RunReason.CLIPPED if clips else RunReason.CHANGED_BEFORE_STEP
    return [not_seen(check, reason, **facts)]


def row_of_some_ranks(step: StepOfRanks) -> ReportRow | None:
    """Is p.grad, alike on all ranks, what only some of them have computed, or do some count more?

    None: it is not, or nobody knows. It needs no replay.
    """
    known, ranks, limit = averages(step), range(len(step.steps)), tolerance(step)
    computes = [any(each.local[rank] for each in known) for rank in ranks]
    if step.differing_parameters("gradients", 1e-4) or not all(computes):
        return None
    if not known or len(ranks) > MOST_RANKS or times_the_mean(step) is not None:
        return None
    facts = {"step": step.number, "at": step.at}
    for number in ranks[1:]:  # the mean of so many of them
        for some in combinations(ranks, number):
            if all(
                abs(each.averaged - sum(each.local[rank] for rank in some) / number)
                <= limit * each.norm
                for each in known
            ):
                reason = RunReason.GRADIENT_OF_SOME
                return wrong(Check.AVERAGED_GRADIENTS, reason, ranks=[*some], **facts)
    if len(known) <= len(ranks) + 1:  # they would fit by chance
        return None
    local = torch.tensor([each.local for each in known], dtype=torch.float64)
    averaged, norms = torch.tensor(
        [[each.averaged, each.norm] for each in known], dtype=torch.float64
    ).unbind(1)
    weights = torch.linalg.lstsq(local, averaged[:, None]).solution.squeeze(1)
    if bool(((local @ weights - averaged).abs() > limit * norms).any()):
        return None
    shares = [float(weight) for weight in weights]
    return warning(Check.AVERAGED_GRADIENTS, RunReason.WEIGHTED_SUM, shares=shares, **facts)


class Averaged(NamedTuple):
    """Of a parameter: p.grad at a step, and what backward gave each rank. Projections, and a norm
    to compare their differences with."""

    averaged: float
    local: list[float]
    norm: float


def averages(step: StepOfRanks) -> list[Averaged]:
    """Of the parameters that got a gradient on some rank: where none came, it was zero."""
    pairs = zip(step.by_parameter("gradients"), step.by_parameter("local_gradients"), strict=True)
    scale = step.steps[0].loss_scale
    return [
        Averaged(gradients[0][0], [(own or 0.0) / scale for own in local], gradients[0][1])
        for gradients, local in pairs
        if None not in gradients and any(own is not None for own in local)
        and gradients[0][1] > TINY
    ]  # fmt: skip


def tolerance(step: StepOfRanks) -> float:
    return max(TOLERANCES.get(step.steps[0].dtype, 5e-2), 2 * step.exchange_precision)


def times_the_mean(step: StepOfRanks) -> float | None:
    """The one factor by which p.grad differs from the mean over the ranks of what backward gave."""
    known = [
        (each.averaged, sum(each.local) / len(each.local), each.norm) for each in averages(step)
    ]
    sure = sorted(gradient / mean for gradient, mean, norm in known if abs(mean) > 0.05 * norm)
    if not sure:
        return None
    factor, limit = sure[len(sure) // 2], tolerance(step)
    agree = all(abs(gradient - factor * mean) <= limit * norm for gradient, mean, norm in known)
    return factor if agree else None
