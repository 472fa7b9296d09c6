"""Say in words how all ranks and one rank differ: in which layer, by which factor, from which step?

compare_steps.py finds the difference, and these rows and phrases only explain it.
"""

from typing import Any

import torch

from prove.judge.distances import distance, name_of_largest_error
from prove.judge.reasons import Phrase, Reason
from prove.judge.replay import Gradients, Precision, Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import ReplayCheck, ReportRow, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import Flag, LayerOutput, Mode, OptimizerRecord, OptimizerStep

LIMIT_OF_OUTPUTS = 1e-6  # relative to the largest value
SMALLEST_SHARE = 1e-9  # a parameter with less of the gradient's length tells no factor


def row_of_other_gradient(
    replay: Replay,
    optimizer: OptimizerRecord,
    gradients: list[Gradients],
    limit: float,
    facts: dict[str, Any],
) -> ReportRow:
    """Explain a first gradient that differs: in which parameters, and is it one factor?"""
    length = torch.cat([pair.one_gradient for pair in gradients]).norm()
    known = [pair for pair in gradients if pair.one_gradient.norm() > SMALLEST_SHARE * length]
    names, world_size = optimizer.names, len(replay.records)
    farthest = max(gradients, key=relative_error_of)
    facts = facts | {
        "most_in": names[farthest.parameter],
        "shares": {names[pair.parameter]: relative_error_of(pair) for pair in gradients},
    }
    factors = sorted(map(factor_between, known))
    factor = factors[len(factors) // 2] if factors else 1.0
    agreeing = [pair for pair in known if is_multiple(pair, factor, limit)]
    is_scaled = len(agreeing) > len(known) // 2 and abs(factor - 1) > 1e-4
    if not is_scaled:
        return wrong(replay.check, reason_of_difference(replay, optimizer), **facts)
    facts |= {"factor": factor, "times": factor_in_words(factor, world_size)}
    facts |= {"agreeing": len(agreeing), "parameters": len(known)}
    if len(agreeing) < len(known):
        return wrong(replay.check, ReplayReason.FACTOR_IN_SOME, **facts)
    if abs(factor * world_size - 1) >= 1e-3:
        return wrong(replay.check, ReplayReason.FACTOR, **facts)
    if reduced_at := replay.rank_0_record.flags.get(Flag.REDUCES_WITHOUT_BACKWARD):
        return wrong(replay.check, ReplayReason.ONE_NTH_OF_A_SUM, reduced_at=reduced_at, **facts)
    return wrong(replay.check, ReplayReason.ONE_NTH, **facts)


def relative_error_of(pair: Gradients) -> float:
    return float(
        (pair.ranks_gradient - pair.one_gradient).norm() / (pair.one_gradient.norm() + 1e-30)
    )


def factor_between(pair: Gradients) -> float:
    return float(pair.ranks_gradient @ pair.one_gradient / (pair.one_gradient @ pair.one_gradient))


def is_multiple(pair: Gradients, factor: float, limit: float) -> bool:
    distance_to_it = (pair.ranks_gradient - factor * pair.one_gradient).norm()
    return bool(distance_to_it <= limit * abs(factor) * pair.one_gradient.norm())


def factor_in_words(factor: float, world_size: int) -> str:
    n = world_size
    names = {n: f"{n} times", 1 / n: f"1/{n} of", n**2: f"{n**2} times"}
    near = [name for value, name in names.items() if abs(factor - value) < 1e-3 * value]
    return near[0] if near else f"{factor:.4g} times"


def reason_of_difference(replay: Replay, optimizer: OptimizerRecord) -> Reason:
    """Choose the reason for a gradient that differs by no factor."""
    if optimizer.compares_changes:
        return ReplayReason.CHANGE_DIFFERS
    gathers = [call for call in replay.rank_0_record.collectives if "gather" in call.name]
    if any(not call.library and not call.name.endswith("object") for call in gathers):
        return ReplayReason.GRADIENT_DIFFERS_GATHER
    return ReplayReason.GRADIENT_DIFFERS


def row_of_later_gradient(
    replay: Replay,
    optimizer: OptimizerRecord,
    steps: list[tuple[OptimizerStep, OptimizerStep]],
    number: int,
    wrong_from: float,
    facts: dict[str, Any],
) -> ReportRow:
    """Explain a gradient that differs first in step `number`, on all ranks and on one."""
    ranks_step, one_step = steps[number - 1]
    facts = facts | {"step": number, "epoch": ranks_step.epoch}
    batches = (ranks_step.epoch, ranks_step.batch), (one_step.epoch, one_step.batch)
    if batches[0] != batches[1] and replay.check == ReplayCheck.ONE_RANK:
        facts |= {"batch": ranks_step.batch, "other": one_step.batch, "at": ranks_step.source_line}
        return warning(replay.check, ReplayReason.OTHER_BATCH, **facts)
    gradients = ranks_step.gradients, one_step.gradients
    facts |= {"most_in": name_of_largest_error(optimizer.names, *gradients)}
    before = distance(ranks_step.weights_before, one_step.weights_before)
    change = distance(ranks_step.weights_after, steps[0][0].weights_before)
    if before > wrong_from * change:
        return wrong(replay.check, ReplayReason.WEIGHTS_CHANGED_BETWEEN, **facts)
    facts |= {"at": source_line_of_loss(replay) or facts["at"]}
    return wrong(replay.check, ReplayReason.LATER_GRADIENT_DIFFERS, **facts)


def advice_against_rounding(run_in: Precision, in_float64: bool) -> dict[str, Any]:
    """Advise how to run the script so that rounding can be told from a mistake."""
    if run_in == Precision.FLOAT64:
        return phrase(Phrase.ALLOW_FLOAT32 if in_float64 else Phrase.SEND_IN_FLOAT64)
    if in_float64:
        return phrase(Phrase.COMPUTE_IN_FLOAT64)
    is_asked = run_in == Precision.AS_ASKED
    return phrase(Phrase.LEAVE_OUT_FLOAT32 if is_asked else Phrase.KEPT_IN_FLOAT32)


def first_difference(replay: Replay) -> dict[str, Any]:
    """Return a phrase that ends a sentence: which layer's output before step 1 differs first."""
    if replay.name == Mode.SEQUENCE:  # a sequence calls each layer more often
        return phrase(Phrase.NOTHING)
    in_turn = zip(
        *(rank.outputs for rank in replay.records), replay.one_rank_record.outputs, strict=False
    )
    seen = 0
    for *ranks_outputs, one_output in in_turn:
        for rank, own in enumerate(ranks_outputs):
            if (own.layer, own.class_name) != (one_output.layer, one_output.class_name):
                facts = {"rank": rank, "layer": name_of(own), "other": name_of(one_output)}
                return phrase(Phrase.OTHER_LAYER, **facts)
        if len(one_output.rows) != sum(len(own.rows) for own in ranks_outputs):
            continue  # the output has no row for each sample
        if are_apart(ranks_outputs, one_output):
            return phrase(Phrase.FIRST_OUTPUT, layer=name_of(one_output))
        seen += 1
    return phrase(Phrase.AFTER_THE_MODEL if seen else Phrase.NOTHING)


def name_of(output: LayerOutput) -> str:
    return f"{output.layer} ({output.class_name})".strip()


def are_apart(ranks_outputs: list[LayerOutput], one_output: LayerOutput) -> bool:
    """Do the outputs differ, whatever the order of the samples?"""
    rows = sorted(value for own in ranks_outputs for value in own.rows)
    largest = max(map(abs, rows), default=0.0) or 1.0
    return any(
        not abs(own - one) <= LIMIT_OF_OUTPUTS * largest
        for own, one in zip(rows, sorted(one_output.rows), strict=True)
    )


def source_line_of_loss(replay: Replay) -> str:
    """Return the line of the first loss, or else of its backward; empty if unknown."""
    backwards = replay.rank_0_record.backwards
    return (backwards[0].loss_source_line or backwards[0].source_line) if backwards else ""
