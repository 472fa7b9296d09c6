"""Is p.grad the same on all ranks at each step, and the mean of their local gradients?

The record of a step holds both, because the proof compares them, too.
"""

from itertools import combinations
from typing import NamedTuple

import torch

from prove.checks import weights
from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import AVERAGE, NO_DDP, STEP, accumulate, own_step, plain
from prove.checks.weights import WAS_FROZEN, WRAP_AGAIN, unfrozen_parameters
from prove.judge.rank_steps import (
    MAX_SPREAD_OF_MEAN,
    TINY,
    StepOfRanks,
    differ,
    parameter_names,
    steps_with_old_gradients,
)
from prove.judge.reasons import Heading, Reason
from prove.judge.table import RIGHT, WARNING, WRONG, ReportRow, not_seen, right, warning, wrong
from prove.rank_record import Flag

NAME = "averaged gradients"
APART = "the ranks step with different gradients in {apart} of {tensors} tensors: {names} "
APART += "(step {step} at {at})"
TOLERANCES = {"torch.float64": 1e-6, "torch.complex128": 1e-6}
TOLERANCES |= {"torch.float32": 2e-3, "torch.complex64": 2e-3}
MAX_RANKS = 8  # with more ranks, not every subset is tried


class Sentence(Reason):
    LOCAL_STEPS = (
        "each rank steps with its own: weights are averaged, it seems",
        "see the rows weights and one rank, which compare what is averaged",
    )
    GRADIENTS_UNFROZEN = (f"{APART}; {WAS_FROZEN}", WRAP_AGAIN, Heading.LOSS)
    GRADIENTS_DIFFER = (
        APART,
        "forward and backward through DDP; no_sync for all micro-batches but the last",
        Heading.LOSS,
    )
    IMAGINARY_LOST = (
        "the gradient of {names} is complex after backward, and real in the step: its imaginary "
        "part is zero (step {step} at {at})",
        "average both parts: all_reduce of the complex tensor or of torch.view_as_real(grad)",
        Heading.LOSS,
    )
    GRADIENT_OF_SOME = (
        "every rank steps with what rank {ranks} has computed alone, not with the mean over all "
        "ranks (step {step} at {at})",
        "average over all ranks; who receives into p.grad.data or a view of it overwrites p.grad: "
        "receive into a tensor of its own",
        Heading.LOSS,
    )
    WEIGHTED_SUM = (
        "a weighted sum over the ranks, which count {shares:each .3g} times (step {step} at {at})",
        "the mean; meant so if these are the shares of the samples or tokens of each rank",
        Heading.LOSS,
    )
    NO_MULTIPLE_OF_MEAN = (
        "no multiple of the mean over the ranks: changed between backward and step?"
    )
    MEAN_OF_RANKS = "the mean over the ranks, in {steps:n step}"
    CLIPPED = "clipped before the step: {factor:.4g} times the mean (step {step} at {at})"
    CLIPPED_APART = (
        "clipped before the step ({at}), by value or part by part: no multiple of the mean over "
        "the ranks is left to compare",
        "to see the mean here, prove it with so high a limit that nothing is clipped",
    )
    SUM_OF_RANKS = (
        "the sum over the ranks, not their mean (step {step} at {at})",
        "divide by the number of ranks; meant so if the loss is divided by it already",
    )
    CHANGED_BEFORE_STEP = (
        "changed before the step: {factor:.4g} times the mean (step {step} at {at})"
    )


def judge(context: CheckContext) -> list[ReportRow]:
    if row := row_of_apart(context) or row_of_lost_imaginary(context):
        return [row]
    if steps_with_old_gradients(context.steps):
        return []  # zero_grad.py reports this
    if row := next((row for step in context.steps if (row := row_of_some_ranks(step))), None):
        return [row]
    factors = [(times_the_mean(step), step) for step in context.steps]
    known = [(factor, step) for factor, step in factors if factor is not None]
    clips_at = context.records[0].flags.get(Flag.CLIPS)
    if not known and clips_at:
        return [not_seen(NAME, Sentence.CLIPPED_APART, at=clips_at)]
    if not known:
        return [not_seen(NAME, Sentence.NO_MULTIPLE_OF_MEAN)]
    factor, step = max(known, key=lambda pair: abs(pair[0] - 1))
    if abs(factor - 1) <= tolerance(step):
        return [right(NAME, Sentence.MEAN_OF_RANKS, steps=len(known))]
    facts = {"factor": factor, "step": step.step_number, "at": step.source_line}
    ranks = len(step.steps)
    if abs(factor - ranks) <= ranks * tolerance(step):
        return [not_seen(NAME, Sentence.SUM_OF_RANKS, **facts)]
    clips = factor < 1 and clips_at
    return [not_seen(NAME, Sentence.CLIPPED if clips else Sentence.CHANGED_BEFORE_STEP, **facts)]


def row_of_apart(context: CheckContext) -> ReportRow | None:
    """Judge gradients that differ between ranks; None if no step or no weight differs."""
    verdicts = context.verdicts(weights.CHECK)
    differing = [step for step in context.steps if parameters_apart(step)]
    if not differing or verdicts == [RIGHT]:
        return None
    if WARNING in verdicts:
        return not_seen(NAME, Sentence.LOCAL_STEPS)
    step, apart = differing[0], parameters_apart(differing[0])
    facts = {
        "apart": len(apart), "tensors": len(step.optimizer.names),
        "names": parameter_names(step.optimizer, apart), "step": step.step_number,
        "at": step.source_line,
    }  # fmt: skip
    unfrozen = unfrozen_parameters(context.records[0])
    made_at = [unfrozen.get(step.optimizer.keys[number]) for number in apart]
    if all(made_at):
        return wrong(NAME, Sentence.GRADIENTS_UNFROZEN, wrapped_at=made_at[0], **facts)
    return wrong(NAME, Sentence.GRADIENTS_DIFFER, **facts)


def parameters_apart(step: StepOfRanks) -> list[int]:
    """Index the parameters for which the ranks hold different gradients."""
    held = step.by_parameter(lambda of_rank: of_rank.gradients)
    return [
        index
        for index, gradients in enumerate(held)
        if None not in gradients and differ(gradients, MAX_SPREAD_OF_MEAN)
    ]


def row_of_lost_imaginary(context: CheckContext) -> ReportRow | None:
    for step in context.steps:
        if numbers := {n for of_rank in step.steps for n in of_rank.lost_imaginary}:
            names = parameter_names(step.optimizer, sorted(numbers))
            return wrong(
                NAME,
                Sentence.IMAGINARY_LOST,
                names=names,
                step=step.step_number,
                at=step.source_line,
            )
    return None


def row_of_some_ranks(step: StepOfRanks) -> ReportRow | None:
    """Find out whether p.grad averages only some ranks, or gives some more weight.

    Local gradients are enough for this, without a replay. Returns None if p.grad is the mean of all
    ranks, or if this cannot be known.
    """
    known, ranks, limit = averages(step), range(len(step.steps)), tolerance(step)
    computes = [any(each.local[rank] for each in known) for rank in ranks]
    if parameters_apart(step) or not all(computes):
        return None
    if not known or len(ranks) > MAX_RANKS or times_the_mean(step) is not None:
        return None
    facts = {"step": step.step_number, "at": step.source_line}
    for number in ranks[1:]:  # size of the subset
        for some in combinations(ranks, number):
            if all(
                abs(each.averaged - sum(each.local[rank] for rank in some) / number)
                <= limit * each.norm
                for each in known
            ):
                return wrong(NAME, Sentence.GRADIENT_OF_SOME, ranks=[*some], **facts)
    if len(known) <= len(ranks) + 1:  # too few equations: weights would fit by chance
        return None
    local = torch.tensor([each.local for each in known], dtype=torch.float64)
    averaged, norms = torch.tensor(
        [[each.averaged, each.norm] for each in known], dtype=torch.float64
    ).unbind(1)
    shares = torch.linalg.lstsq(local, averaged[:, None]).solution.squeeze(1)
    if bool(((local @ shares - averaged).abs() > limit * norms).any()):
        return None
    return warning(NAME, Sentence.WEIGHTED_SUM, shares=shares.tolist(), **facts)


class Averaged(NamedTuple):
    """One parameter at a step, projected: p.grad, and the local gradient of each rank.

    Differences between them are compared relative to `norm`, the norm of p.grad.
    """

    averaged: float
    local: list[float]
    norm: float


def averages(step: StepOfRanks) -> list[Averaged]:
    """Return one Averaged per parameter with a gradient; a rank without one counts as zero."""
    gradients_and_local = zip(
        step.by_parameter(lambda of_rank: of_rank.gradients),
        step.by_parameter(lambda of_rank: of_rank.local_gradients),
        strict=True,
    )
    scale = step.steps[0].loss_scale
    return [
        Averaged(gradients[0][0], [(own or 0.0) / scale for own in local], gradients[0][1])
        for gradients, local in gradients_and_local
        if None not in gradients and any(own is not None for own in local)
        and gradients[0][1] > TINY
    ]  # fmt: skip


def tolerance(step: StepOfRanks) -> float:
    return max(TOLERANCES.get(step.steps[0].dtype, 5e-2), 2 * step.exchange_precision)


def times_the_mean(step: StepOfRanks) -> float | None:
    """Return the factor between p.grad and the mean local gradient, if all parameters share it."""
    known = [
        (each.averaged, sum(each.local) / len(each.local), each.norm) for each in averages(step)
    ]
    sure = sorted(gradient / mean for gradient, mean, norm in known if abs(mean) > 0.05 * norm)
    if not sure:
        return None
    factor, limit = sure[len(sure) // 2], tolerance(step)
    agree = all(abs(gradient - factor * mean) <= limit * norm for gradient, mean, norm in known)
    return factor if agree else None


PLANTED = (
    plain(
        "only some gradients are averaged by hand", WRONG, NAME,
        *NO_DDP, (STEP, AVERAGE.replace("ddp.parameters()", "ddp[0].parameters()") + STEP),
    ),
    accumulate(
        "no micro-batch is synchronized", WRONG, NAME,
        ("nullcontext() if last else ddp.no_sync()", "ddp.no_sync()"),
    ),
    accumulate(
        "the last micro-batch is not synchronized", WRONG, NAME,
        ("nullcontext() if last else", "nullcontext() if not last else"),
    ),
    accumulate(
        "only the last micro-batch is averaged", WRONG, NAME,
        ("    ddp = DDP(model)\n", "    ddp = model\n"),
        ("nullcontext() if last else ddp.no_sync()", "nullcontext()"),
        (
            "(loss * world_size / words).backward()",
            "parts = torch.autograd.grad(loss * world_size / words, ddp.parameters())\n"
            "                for p, part in zip(ddp.parameters(), parts):\n"
            "                    if last:\n"
            "                        dist.all_reduce(part)\n"
            "                        part /= world_size\n"
            "                    p.grad = part if p.grad is None else p.grad + part",
        ),
    ),
    own_step(
        "only rank 0 counts in the mean", WRONG, NAME,
        ("                average(p.grad)\n", ""),
        (
            "            loss.backward()\n",
            "            loss.backward()\n"
            "            for p in params:\n"
            "                dist.broadcast(p.grad, 0)\n",
        ),
    ),
)  # fmt: skip
# If one rank computes the same, the change of the gradients was no mistake. A lost imaginary part
# is the exception, because one rank loses it, too.
UNEXPLAINED = frozenset({*Sentence} - {Sentence.MEAN_OF_RANKS, Sentence.IMAGINARY_LOST})
CHECK = Check(NAME, judge, Phase.ONE_MODEL, moot_if_proven=UNEXPLAINED, planted=PLANTED)
