"""Does one rank compute what all ranks compute? This is the proof; all other rows explain it.

The gradients of all steps are compared, and the weights after the last one. If they differ,
explain_difference.py finds words for it.
"""

from itertools import takewhile
from typing import Any

import torch

from prove.comparable import precision
from prove.judge.distances import (
    are_finite,
    distance,
    factor_of_moments,
    has_gradient,
    name_of_largest_error,
    relative_error_by_step,
    relative_error_of_projections,
    weights_are_finite,
    weights_differ,
)
from prove.judge.explain_difference import (
    advice_against_rounding,
    factor_in_words,
    first_difference,
    row_of_later_gradient,
    row_of_other_gradient,
    source_line_of_loss,
)
from prove.judge.rank_steps import MAX_SPREAD_OF_MEAN, differ
from prove.judge.reasons import Phrase
from prove.judge.replay import Precision, Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import Flag, OptimizerRecord, OptimizerStep, Projection

FLOAT64_LIMIT = 1e-9  # the largest relative error of gradients that rounding alone can make
FLOAT64_WRONG = 1e-4  # a smaller relative error may be rounding that has grown: no verdict
SMALLEST_LENGTH = 1e-12  # a shorter gradient consists of rounding errors
COARSEST = 0.01  # spacing near 1: bfloat16 has 0.008, coarser numbers tell too little
FIRST_STEPS = 3  # steps compared by weights when ranks average in or after step()
MIN_STEPS = 2  # with changed weights, because Adam's first step keeps only signs
MAX_WEIGHT_ERROR = 1e-5  # relative to a step's change: rounding grows, and Adam magnifies it
MAX_HIDDEN_FACTOR_ERROR = 1e-2  # relative to it: so much of a factor Adam's epsilon lets through

OF_OTHER_PARAMETERS = (ReplayReason.OTHER_SHAPE, ReplayReason.OTHER_PARAMETERS)


class Comparer:
    """Compares the steps of one optimizer on all ranks with those on one rank."""

    def __init__(self, replay: Replay, optimizer_index: int) -> None:
        self.replay, self.optimizer_index, self.check = replay, optimizer_index, replay.check
        self.optimizer: OptimizerRecord = replay.rank_0_record.optimizers[optimizer_index]
        self.gradients = replay.gradients(optimizer_index)
        self.steps = self.comparable_steps()

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {pair.dtypes[0] for pair in self.gradients}

    @property
    def limit(self) -> float:
        """Return the largest relative error that rounding alone can make in equal gradients."""
        spacing = max(map(precision, self.dtypes), default=0.0)  # spacing of numbers near 1
        sent = 2 * self.replay.rank_0_record.exchange_precision
        if spacing > 1e-6:  # in 16 bits
            return 5e-2
        if spacing > 1e-15:  # in 32 bits
            uses_autocast = Flag.USES_AUTOCAST in self.replay.rank_0_record.flags
            return max(sent, 3e-2 if uses_autocast else 3e-3)
        return max(sent, FLOAT64_LIMIT)

    @property
    def wrong_from(self) -> float:
        """Return the relative error from which a difference is WRONG.

        Between `limit` and this value, rounding and a mistake cannot be told apart.
        """
        return FLOAT64_WRONG if self.in_float64 else 5 * self.limit

    @property
    def in_float64(self) -> bool:
        """Did the whole step compute and send in float64?"""
        return self.limit == FLOAT64_LIMIT

    @property
    def advice(self) -> dict[str, Any]:
        return advice_against_rounding(self.replay.precision, self.in_float64)

    def too_close(self, facts: dict[str, Any]) -> ReportRow:
        reason = ReplayReason.TOO_CLOSE if self.in_float64 else ReplayReason.TOO_CLOSE_IN_FLOAT32
        return not_seen(self.check, reason, **facts, advice=self.advice)

    @property
    def source_line(self) -> str:
        return self.optimizer.steps[0].source_line

    def comparable_steps(self) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """Pair the steps of all ranks with those of one, until local batches differ in size."""
        steps = []
        for n, (ranks_step, one_step) in enumerate(self.replay.steps(self.optimizer_index)):
            own = [
                record.optimizers[self.optimizer_index].steps[n]
                for record in self.replay.records
                if self.optimizer_index < len(record.optimizers)
                and n < len(record.optimizers[self.optimizer_index].steps)
            ]
            sizes = {step.batch_size for step in own}
            if len(sizes) > 1 or not one_step.weights_after or not ranks_step.weights_after:
                break
            steps.append((ranks_step, one_step))
        return steps

    def compare(self) -> ReportRow:
        if obstacle := self.why_not_compared():
            return obstacle
        ranks_gradient = torch.cat([pair.ranks_gradient for pair in self.gradients])
        one_gradient = torch.cat([pair.one_gradient for pair in self.gradients])
        # Both norms are 0 if the loss does not depend on the parameters yet.
        length = float(one_gradient.norm() or ranks_gradient.norm())
        relative_error = float((ranks_gradient - one_gradient).norm()) / (length or 1.0)
        if (relative_error > self.limit or not length) and self.averages_later:
            return self.compare_by_weights(relative_error)
        if relative_error <= self.limit:
            return self.compare_weights(relative_error)
        return self.compare_by_gradient(relative_error)

    def compare_by_gradient(self, relative_error: float) -> ReportRow:
        at = source_line_of_loss(self.replay) or self.source_line
        facts = {
            "apart": relative_error,
            "step": 1,
            "at": at,
            "place": first_difference(self.replay),
        }
        if relative_error <= self.wrong_from:
            return self.too_close(facts)
        return row_of_other_gradient(
            self.replay, self.optimizer, self.gradients, max(self.limit, 1e-6), facts
        )

    @property
    def averages_later(self) -> bool:
        """Do the ranks average in step() or after it, so that their gradients differ before it?"""
        own = self.replay.own_steps(self.optimizer_index)
        first = next(
            (ranks_steps for ranks_steps in own if any(map(has_gradient, ranks_steps))), ()
        )
        gradients = zip(*(step.gradients for step in first), strict=False)
        if not any(differ(held, MAX_SPREAD_OF_MEAN) for held in gradients if None not in held):
            return False
        if any(step.exchanges_inside for ranks_steps in own for step in ranks_steps):
            return True
        befores = [[step.weights_before for step in ranks_steps] for ranks_steps in own[1:]]
        afters = [[step.weights_after for step in ranks_steps] for ranks_steps in own[:-1]]
        return (
            len(befores) > 1
            and all(map(weights_differ, afters))
            and not any(map(weights_differ, befores))
        )

    def compare_by_weights(self, relative_error: float) -> ReportRow:
        """Compare the weights that the first steps leave behind for the next ones."""
        inside = any(
            step.exchanges_inside for step in self.replay.own_steps(self.optimizer_index)[0]
        )
        states = [tuple(map(self.weights_before, pair)) for pair in self.steps]
        if inside:
            states.append(
                tuple(self.without_rounding(each.weights_after) for each in self.steps[-1])
            )
        else:
            states += self.states_after_last_step()
        states = [*takewhile(lambda state: all(map(are_finite, state)), states)]
        error_by_step = relative_error_by_step(states)
        facts: dict[str, Any] = {
            "apart": relative_error,
            "steps": len(error_by_step),
            "at": self.source_line,
        }
        if len(error_by_step) < MIN_STEPS:
            return not_seen(self.check, ReplayReason.TOO_FEW_STEPS, **facts)
        first = max(list(error_by_step.values())[:FIRST_STEPS])
        factor = factor_of_moments(self.steps[0]) if first <= MAX_HIDDEN_FACTOR_ERROR else None
        if factor is not None:
            facts |= {"factor": factor, "times": factor_in_words(factor, len(self.replay.records))}
            facts["weights_apart"] = first
            return warning(self.check, ReplayReason.HIDDEN_FACTOR, **facts)
        step = next(
            (n for n, value in error_by_step.items() if value > self.wrong_from), max(error_by_step)
        )
        facts |= {"weights_apart": max(error_by_step.values()), "step": step}
        if facts["weights_apart"] <= max(MAX_WEIGHT_ERROR, self.limit):
            return right(self.check, ReplayReason.EQUAL_AFTER_STEP, **facts)
        if facts["weights_apart"] <= self.wrong_from:
            return self.too_close(facts | {"apart": facts["weights_apart"]})
        facts |= {
            "weights_apart": error_by_step[step],
            "most_in": name_of_largest_error(self.optimizer.names, *states[step]),
        }
        facts["epoch"] = self.steps[step - 1][0].epoch
        if inside:
            return wrong(self.check, ReplayReason.STEP_DIFFERS, **facts)
        return warning(self.check, ReplayReason.AVERAGED_WEIGHTS_DIFFER, **facts)

    def states_after_last_step(self) -> list[tuple[list[Projection], ...]]:
        """Return the weights that the script left after the last step; empty if they are unknown.

        With several optimizers, nobody knows whose steps changed them.
        """
        runs, count = (self.replay.rank_0_record, self.replay.one_rank_record), len(self.steps)
        keys = self.optimizer.keys
        stepping = [optimizer for optimizer in runs[0].optimizers if optimizer.steps]
        known = all({*keys} <= run.weights.get(count, {}).keys() for run in runs)
        if len(stepping) > 1 or not known:
            return []
        held = [[run.weights[count][key] for key in keys] for run in runs]
        return [tuple(map(self.without_rounding, held))]

    def weights_before(self, step: OptimizerStep) -> list[Projection]:
        return self.without_rounding(step.weights_before)

    def without_rounding(self, weights: list[Projection]) -> list[Projection]:
        """Replace the weights by zeros where the gradient is only rounding in all steps.

        A bias before BatchNorm is an example. Adam divides such a gradient by its own size, so the
        weights of both runs differ, though neither run is wrong.
        """
        of_steps = [one_step.gradients for _, one_step in self.steps if has_gradient(one_step)]
        of_steps = [each for each in of_steps if are_finite([own for own in each if own])]
        lengths = [max(gradient[1] for gradient in each if gradient) for each in of_steps]
        rounding = max(FLOAT64_LIMIT, 1e-3 * self.limit)
        return [
            (0.0, 0.0)
            if any(gradients)
            and all(
                not gradient or gradient[1] < rounding * length
                for gradient, length in zip(gradients, lengths, strict=True)
            )
            else own
            for own, *gradients in zip(weights, *of_steps, strict=True)
        ]

    def why_not_compared(self) -> ReportRow | None:
        """Say why the two runs cannot be compared; return None if they can."""
        replay, other_shapes = self.replay, self.replay.one_rank_record.other_shapes
        names = self.optimizer.names
        if self.optimizer_index in other_shapes or any(
            pair.shapes[0] != pair.shapes[1] for pair in self.gradients
        ):
            for parameter, ranks_have, one_has in other_shapes.get(self.optimizer_index, [])[:1]:
                name = names[parameter]
                return not_seen(
                    self.check,
                    ReplayReason.OTHER_SHAPE,
                    name=name,
                    of_ranks=ranks_have,
                    of_one=one_has,
                )
            return not_seen(self.check, ReplayReason.OTHER_PARAMETERS)
        if kinds := replay.rank_0_record.not_comparable or replay.one_rank_record.not_comparable:
            return not_seen(self.check, ReplayReason.TENSOR_KIND, kinds=kinds, at=self.source_line)
        if not self.gradients:
            return not_seen(self.check, ReplayReason.NO_GRADIENTS)
        if Flag.BATCHNORM_ROWS_UNKNOWN in replay.one_rank_record.flags:
            return not_seen(self.check, ReplayReason.BATCHNORM_ROWS)
        if max(map(precision, self.dtypes)) > COARSEST:
            kinds = sorted(map(str, self.dtypes))
            return not_seen(self.check, ReplayReason.TENSOR_KIND, kinds=kinds, at=self.source_line)
        if self.dtypes != {pair.dtypes[1] for pair in self.gradients}:
            one_has = sorted({str(pair.dtypes[1]) for pair in self.gradients})
            ranks_have = sorted(map(str, self.dtypes))
            is_wider = replay.precision == Precision.FLOAT64
            advice = phrase(Phrase.TRY_FLOAT32 if is_wider else Phrase.OWN_DTYPE)
            return not_seen(
                self.check,
                ReplayReason.OTHER_DTYPES,
                of_ranks=ranks_have,
                of_one=one_has,
                advice=advice,
            )
        both = [
            tensor for pair in self.gradients for tensor in (pair.ranks_gradient, pair.one_gradient)
        ]
        if not all(bool(tensor.isfinite().all()) for tensor in both):
            return not_seen(self.check, ReplayReason.NOT_FINITE, step=1, at=self.source_line)
        length = max(float(tensor.norm()) for tensor in both)
        later = any(has_gradient(step) for pair in self.steps for step in pair)
        if length == 0 and not later:
            return not_seen(self.check, ReplayReason.NOTHING_TO_COMPARE)
        if 0 < length < SMALLEST_LENGTH:
            return not_seen(self.check, ReplayReason.TOO_SHORT, length=length, at=self.source_line)
        return None

    def compare_weights(self, relative_error: float) -> ReportRow:
        """Compare the weights after the last step with those of one rank."""
        facts = {"apart": relative_error, "at": self.source_line, "limit": self.limit}
        if not self.steps:
            return right(self.check, ReplayReason.FIRST_GRADIENT_EQUAL, **facts)
        steps = list(takewhile(weights_are_finite, self.steps))
        if not steps:
            return not_seen(self.check, ReplayReason.NOT_FINITE, **facts, step=1)
        afters = [[own.weights_after for own in pair] for pair in steps]
        if not self.in_float64:
            afters = [[*map(self.without_rounding, pair)] for pair in afters]
        change = distance(steps[-1][0].weights_after, steps[0][0].weights_before) or 1.0
        weight_errors = [distance(*after) / change for after in afters]
        facts |= {"steps": len(steps), "weights_apart": weight_errors[-1]}
        # A rounding error grows from step to step, and Adam divides by small gradients.
        if not self.in_float64:
            return self.compare_less_precisely(steps, weight_errors[-1], facts)
        if weight_errors[-1] <= MAX_WEIGHT_ERROR:
            return right(self.check, ReplayReason.EQUAL_TO_ONE, **facts)
        return self.cause_of_other_weights(steps, weight_errors, facts)

    def compare_less_precisely(
        self,
        steps: list[tuple[OptimizerStep, OptimizerStep]],
        relative_error: float,
        facts: dict[str, Any],
    ) -> ReportRow:
        """Compare later steps: a jump between two steps is a mistake, slow growth is rounding."""
        before = 0.0
        for n, (ranks_step, one_step) in enumerate(steps, start=1):
            gradient_error = relative_error_of_projections(ranks_step.gradients, one_step.gradients)
            if gradient_error > max(self.wrong_from, 30 * before):
                facts |= {"apart": gradient_error}
                return row_of_later_gradient(
                    self.replay, self.optimizer, steps, n, self.wrong_from, facts
                )
            before = max(before, gradient_error)
        if relative_error <= self.limit:
            return right(self.check, ReplayReason.EQUAL_LESS_PRECISE, **facts)
        return not_seen(self.check, ReplayReason.LITTLE_PRECISION, **facts, advice=self.advice)

    def cause_of_other_weights(
        self,
        steps: list[tuple[OptimizerStep, OptimizerStep]],
        weight_errors: list[float],
        facts: dict[str, Any],
    ) -> ReportRow:
        """Find why weights differ: a later gradient, magnified rounding, or a mistake."""
        gradient_errors = [
            relative_error_of_projections(ranks_step.gradients, one_step.gradients)
            for ranks_step, one_step in steps
        ]
        for n, gradient_error in enumerate(gradient_errors, start=1):
            if gradient_error > FLOAT64_WRONG:
                facts |= {"apart": gradient_error}
                return row_of_later_gradient(
                    self.replay, self.optimizer, steps, n, FLOAT64_WRONG, facts
                )
        adapts = any(optimizer.is_adaptive for optimizer in self.replay.rank_0_record.optimizers)
        begins_equal = weight_errors[0] <= MAX_WEIGHT_ERROR
        if adapts and begins_equal and not other_change_between(steps, weight_errors):
            # A bias whose gradient is only rounding (before BatchNorm, in attention's keys) grows
            # from step to step, because the optimizer divides by that gradient. A mistake between
            # two steps would show in the gradient of the second.
            facts |= {"gradients_apart": max(gradient_errors), "first_apart": weight_errors[0]}
            return right(self.check, ReplayReason.EQUAL_BUT_ROUNDING, **facts)
        if max(weight_errors) <= FLOAT64_WRONG:
            return self.too_close(facts | {"step": len(steps), "apart": max(weight_errors)})
        step = next(n for n, far in enumerate(weight_errors) if far > FLOAT64_WRONG)
        both = [own.weights_after for own in steps[step]]
        most_in = name_of_largest_error(self.optimizer.names, *both)
        facts |= {"steps": step + 1, "weights_apart": weight_errors[step], "most_in": most_in}
        facts["epoch"] = steps[step][0].epoch
        return wrong(self.check, ReplayReason.WEIGHTS_OF_ONE_DIFFER, **facts)


def other_change_between(
    steps: list[tuple[OptimizerStep, OptimizerStep]], weight_errors: list[float]
) -> bool:
    """Does the script change equal weights differently between two steps?

    A loss that is linear in the weights, such as a critic's, does not show this in its gradient.
    """
    change = distance(steps[-1][0].weights_after, steps[0][0].weights_before) or 1.0
    return any(
        relative_error <= MAX_WEIGHT_ERROR
        and distance(ranks_step.weights_before, one_step.weights_before) > FLOAT64_WRONG * change
        for relative_error, (ranks_step, one_step) in zip(weight_errors, steps[1:], strict=False)
    )


def comparison_rows(replay: Replay) -> list[ReportRow]:
    """Compare each optimizer that stepped, and return a row for each result."""
    optimizers = replay.rank_0_record.optimizers
    numbers = [n for n, optimizer in enumerate(optimizers) if optimizer.steps]
    compared = [Comparer(replay, optimizer_index).compare() for optimizer_index in numbers]
    in_modules = [n for n in numbers if any(optimizers[n].keys)]
    if in_modules:  # other optimizers may hold each rank's part of the master weights
        compared = [
            each
            for n, each in zip(numbers, compared, strict=True)
            if n in in_modules or each.reason not in OF_OTHER_PARAMETERS
        ]
    if all(each.reason in OF_OTHER_PARAMETERS for each in compared):
        at = compared[0].facts.get("at", optimizers[numbers[0]].source_line)
        if row := compare_by_model(replay, at):
            return [row]
    is_zero = [each.reason == ReplayReason.NOTHING_TO_COMPARE for each in compared]
    if all(is_zero):
        return compared[:1]
    pairs = zip(compared, is_zero, strict=True)
    return one_of_each([each for each, zero in pairs if not zero])


def compare_by_model(replay: Replay, at: str) -> ReportRow | None:
    """Compare the weights of the whole model between batches; return None if that is not enough.

    This is needed where the optimizer of each rank holds only the parameters that the rank owns.
    """
    ranks_weights, one_weights = replay.rank_0_record.weights, replay.one_rank_record.weights
    counts = sorted(ranks_weights.keys() & one_weights.keys())
    keys = [key for key in ranks_weights.get(0, {}) if key in one_weights.get(0, {})]
    states = [
        [[run[count][key] for key in keys] for run in (ranks_weights, one_weights)]
        for count in counts
    ]
    error_by_step = relative_error_by_step(states)
    if len(error_by_step) < MIN_STEPS or distance(*states[0]) > 0:
        return None
    relative_error = max(error_by_step.values())
    facts = {
        "steps": len(error_by_step),
        "weights_apart": relative_error,
        "apart": relative_error,
        "at": at,
    }
    if relative_error <= MAX_WEIGHT_ERROR:
        return right(replay.check, ReplayReason.EQUAL_AFTER_STEP, **facts)
    if relative_error <= MAX_HIDDEN_FACTOR_ERROR:
        return None
    step = next(n for n, value in error_by_step.items() if value > MAX_HIDDEN_FACTOR_ERROR)
    most_in = name_of_largest_error(keys, *states[step]).partition(": ")[2]
    facts |= {"step": step, "most_in": most_in, "weights_apart": error_by_step[step]}
    return wrong(replay.check, ReplayReason.STEP_DIFFERS, **facts)


def one_of_each(rows: list[ReportRow]) -> list[ReportRow]:
    """Of optimizers with one reason and line, keep the one with the largest error."""
    groups: dict[tuple, list[ReportRow]] = {}
    for each in rows:
        key = (each.reason, each.facts.get("at"), each.facts.get("times"))
        groups.setdefault(key, []).append(each)
    return [max(group, key=relative_error_in) for group in groups.values()]


def relative_error_in(row: ReportRow) -> float:
    return float(row.facts.get("apart", 0.0))


def largest_relative_error(rows: list[ReportRow]) -> float:
    return max(map(relative_error_in, rows), default=0.0)
