"""Does one rank compute what all ranks compute? This is the proof; all other rows explain it.

Compared are the gradients of all steps, and the weights after the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from prove.comparable import precision
from prove.judge.place import place_of_difference, place_of_loss
from prove.judge.reasons import Phrase, Reason
from prove.judge.replay import Gradients, Precision, Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.steps import differ
from prove.judge.table import NOT_SEEN, RIGHT, WARNING, WRONG, ProofRow, ReportRow
from prove.judge.wording import phrase
from prove.rank_record import Flag, OptimizerRecord, OptimizerStep, Projection

FLOAT64_LIMIT = 1e-9  # how far rounding can bring equal gradients apart, in units of their length
FLOAT64_WRONG = 1e-4  # what differs less may be rounding that has grown: no verdict
SMALLEST_LENGTH = 1e-12  # a gradient that is shorter is rounding itself
COARSEST = 0.01  # numbers near 1 are 0.008 apart in bfloat16: coarser ones tell too little
FIRST_STEPS = 3  # whose weights decide where the gradient is not yet what all ranks have in common
FEWEST_STEPS = 2  # that moved: Adam's first step is a sign
WEIGHTS_LIMIT = 1e-5  # of what a step changes: rounding grows, and Adam divides by small gradients
HIDDEN_FACTOR_LIMIT = 1e-2  # of that change: what the epsilon of Adam lets through of a factor


Projections = Sequence[Projection | None]
OF_OTHER_PARAMETERS = (ReplayReason.OTHER_SHAPE, ReplayReason.OTHER_PARAMETERS)


class Outcome(Enum):
    """What a comparison has shown, from the worst to the best."""

    DIFFERENT = "different"
    MEANT_SO = "different, as may be meant"
    NOT_COMPARED = "not compared"
    TOO_CLOSE = "too close to tell"
    EQUAL = "equal"


VERDICTS = {Outcome.DIFFERENT: WRONG, Outcome.MEANT_SO: WARNING, Outcome.EQUAL: RIGHT}


@dataclass(frozen=True)
class Comparison:
    """The result for one optimizer: its steps on all ranks and on one. facts: the numbers."""

    outcome: Outcome
    reason: Reason
    facts: dict[str, Any] = field(default_factory=dict)

    def row(self, check: ProofRow) -> ReportRow:
        return ReportRow(VERDICTS.get(self.outcome, NOT_SEEN), check, self.reason, self.facts)


def not_compared(reason: Reason, **facts: Any) -> Comparison:
    return Comparison(Outcome.NOT_COMPARED, reason, facts)


class Comparer:
    """Compares the steps of one optimizer."""

    def __init__(self, replay: Replay, number: int) -> None:
        self.replay, self.number = replay, number
        self.optimizer: OptimizerRecord = replay.observed.optimizers[number]
        self.gradients = replay.gradients(number)
        self.steps = self.comparable_steps()

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {pair.dtypes[0] for pair in self.gradients}

    @property
    def limit(self) -> float:
        """How far rounding alone can bring two equal gradients apart, in units of their length."""
        spacing = max(map(precision, self.dtypes), default=0.0)  # of numbers near 1
        sent = 2 * self.replay.observed.exchange_precision
        if spacing > 1e-6:  # in 16 bits
            return 5e-2
        if spacing > 1e-15:  # in 32 bits
            uses_autocast = Flag.USES_AUTOCAST in self.replay.observed.flags
            return max(sent, 3e-2 if uses_autocast else 3e-3)
        return max(sent, FLOAT64_LIMIT)

    @property
    def wrong_from(self) -> float:
        return FLOAT64_WRONG if self.limit == FLOAT64_LIMIT else 5 * self.limit

    @property
    def advice(self) -> dict[str, Any]:
        """How to run it so that rounding is told from a mistake."""
        run_in, in_float64 = self.replay.precision, self.limit == FLOAT64_LIMIT
        if run_in == Precision.FLOAT64:
            return phrase(Phrase.ALLOW_FLOAT32 if in_float64 else Phrase.SEND_IN_FLOAT64)
        if in_float64:
            return phrase(Phrase.COMPUTE_IN_FLOAT64)
        is_asked = run_in == Precision.AS_ASKED
        return phrase(Phrase.LEAVE_OUT_FLOAT32 if is_asked else Phrase.KEPT_IN_FLOAT32)

    def too_close(self, facts: dict[str, Any]) -> Comparison:
        in_float64 = self.limit == FLOAT64_LIMIT
        reason = ReplayReason.TOO_CLOSE if in_float64 else ReplayReason.TOO_CLOSE_IN_FLOAT32
        return Comparison(Outcome.TOO_CLOSE, reason, facts | {"advice": self.advice})

    @property
    def at(self) -> str:
        return self.optimizer.steps[0].at

    def comparable_steps(self) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """Pair the steps of all ranks with those of one, until local batches differ in size."""
        steps = []
        for n, (ranks_step, one_step) in enumerate(self.replay.steps(self.number)):
            own = [
                record.optimizers[self.number].steps[n]
                for record in self.replay.records
                if self.number < len(record.optimizers)
                and n < len(record.optimizers[self.number].steps)
            ]
            sizes = {step.batch_size for step in own}
            if len(sizes) > 1 or not one_step.weights_after or not ranks_step.weights_after:
                break
            steps.append((ranks_step, one_step))
        return steps

    def compare(self) -> Comparison:
        if obstacle := self.why_not_compared():
            return obstacle
        ranks_gradient = torch.cat([pair.ranks_gradient for pair in self.gradients])
        one_gradient = torch.cat([pair.one_gradient for pair in self.gradients])
        # 0: of a loss that has no weight yet
        length = float(one_gradient.norm() or ranks_gradient.norm())
        apart = float((ranks_gradient - one_gradient).norm()) / (length or 1.0)
        if (apart > self.limit or not length) and self.averages_later:
            return self.compare_by_weights(apart)
        if apart <= self.limit:
            return self.compare_weights(apart)
        return self.compare_by_gradient(apart, ranks_gradient, one_gradient)

    def compare_by_gradient(
        self, apart: float, ranks_gradient: Tensor, one_gradient: Tensor
    ) -> Comparison:
        at = place_of_loss(self.replay) or self.at
        facts = {"apart": apart, "step": 1, "at": at, "place": place_of_difference(self.replay)}
        if apart <= self.wrong_from:
            return self.too_close(facts)
        return self.cause_of_other_gradient(ranks_gradient, one_gradient, facts)

    @property
    def averages_later(self) -> bool:
        """Do the ranks talk in step() or after it, and hold other gradients before it?"""
        own = self.replay.own_steps(self.number)
        first = next(
            (ranks_steps for ranks_steps in own if any(map(has_gradient, ranks_steps))), ()
        )
        gradients = zip(*(step.gradients for step in first), strict=False)
        if not any(differ(held, 1e-4) for held in gradients if None not in held):
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

    def compare_by_weights(self, apart: float) -> Comparison:
        """Compare the weights that the first steps leave behind for the next ones."""
        inside = any(step.exchanges_inside for step in self.replay.own_steps(self.number)[0])
        states = [tuple(map(self.weights_before, pair)) for pair in self.steps]
        if inside:
            states.append(
                tuple(self.without_rounding(each.weights_after) for each in self.steps[-1])
            )
        else:
            states += self.states_after_last_step()
        all_finite = takewhile(lambda state: all(map(are_finite, state)), states)
        pairs = list(enumerate(pairwise(all_finite), start=1))
        moved = {n: pair for n, pair in pairs if all(map(distance, *pair))}  # by step
        facts: dict[str, Any] = {"apart": apart, "steps": len(moved), "at": self.at}
        if len(moved) < FEWEST_STEPS:
            return not_compared(ReplayReason.TOO_FEW_STEPS, **facts)
        by_step = {
            n: distance(after[0], after[1]) / distance(before[0], after[0])
            for n, (before, after) in moved.items()
        }
        first = max(list(by_step.values())[:FIRST_STEPS])
        factor = factor_of_moments(self.steps[0]) if first <= HIDDEN_FACTOR_LIMIT else None
        if factor is not None:
            facts |= {"factor": factor, "times": factor_in_words(factor, len(self.replay.records))}
            facts["weights_apart"] = first
            return Comparison(Outcome.MEANT_SO, ReplayReason.HIDDEN_FACTOR, facts)
        step = next((n for n, value in by_step.items() if value > self.wrong_from), max(by_step))
        facts |= {"weights_apart": max(by_step.values()), "step": step}
        if facts["weights_apart"] <= max(WEIGHTS_LIMIT, self.limit):
            return Comparison(Outcome.EQUAL, ReplayReason.EQUAL_AFTER_STEP, facts)
        if facts["weights_apart"] <= self.wrong_from:
            return self.too_close(facts | {"apart": facts["weights_apart"]})
        facts |= {
            "weights_apart": by_step[step],
            "most_in": self.farthest_parameter(*moved[step][1]),
        }
        facts["epoch"] = self.steps[step - 1][0].epoch
        reason = ReplayReason.STEP_DIFFERS if inside else ReplayReason.AVERAGED_WEIGHTS_DIFFER
        outcome = Outcome.DIFFERENT if inside else Outcome.MEANT_SO
        return Comparison(outcome, reason, facts)

    def states_after_last_step(self) -> list[tuple[list[Projection], ...]]:
        """What the script has made of the weights then, if no other optimizer steps."""
        runs, count = (self.replay.observed, self.replay.replayed), len(self.steps)
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
        """Zeros for parameters whose gradient is rounding in all steps, before BatchNorm for
        instance: Adam divides it by itself."""
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

    def farthest_parameter(self, ranks_gradients: Projections, one_gradients: Projections) -> str:
        """The name of the parameter whose weight or gradient is farthest from that of one rank."""
        pairs = zip(ranks_gradients, one_gradients, strict=False)
        far = [abs(own[0] - one[0]) if own and one else 0.0 for own, one in pairs]
        return self.optimizer.names[far.index(max(far))]

    def why_not_compared(self) -> Comparison | None:
        """Why the two runs cannot be compared."""
        replay, other_shapes = self.replay, self.replay.replayed.other_shapes
        names = self.optimizer.names
        if self.number in other_shapes or any(
            pair.shapes[0] != pair.shapes[1] for pair in self.gradients
        ):
            for parameter, ranks_have, one_has in other_shapes.get(self.number, [])[:1]:
                name = names[parameter]
                return not_compared(
                    ReplayReason.OTHER_SHAPE, name=name, of_ranks=ranks_have, of_one=one_has
                )
            return not_compared(ReplayReason.OTHER_PARAMETERS)
        if kinds := replay.observed.not_comparable or replay.replayed.not_comparable:
            return not_compared(ReplayReason.TENSOR_KIND, kinds=kinds, at=self.at)
        if not self.gradients:
            return not_compared(ReplayReason.NO_GRADIENTS)
        if Flag.BATCHNORM_ROWS_UNKNOWN in replay.replayed.flags:
            return not_compared(ReplayReason.BATCHNORM_ROWS)
        if max(map(precision, self.dtypes)) > COARSEST:
            kinds = sorted(map(str, self.dtypes))
            return not_compared(ReplayReason.TENSOR_KIND, kinds=kinds, at=self.at)
        if self.dtypes != {pair.dtypes[1] for pair in self.gradients}:
            one_has = sorted({str(pair.dtypes[1]) for pair in self.gradients})
            ranks_have = sorted(map(str, self.dtypes))
            is_wider = replay.precision == Precision.FLOAT64
            advice = phrase(Phrase.TRY_FLOAT32 if is_wider else Phrase.OWN_DTYPE)
            return not_compared(
                ReplayReason.OTHER_DTYPES, of_ranks=ranks_have, of_one=one_has, advice=advice
            )
        both = [
            tensor for pair in self.gradients for tensor in (pair.ranks_gradient, pair.one_gradient)
        ]
        if not all(bool(tensor.isfinite().all()) for tensor in both):
            return not_compared(ReplayReason.NOT_FINITE, step=1, at=self.at)
        length = max(float(tensor.norm()) for tensor in both)
        later = any(has_gradient(step) for pair in self.steps for step in pair)
        if length == 0 and not later:
            return not_compared(ReplayReason.NOTHING_TO_COMPARE)
        if 0 < length < SMALLEST_LENGTH:
            return not_compared(ReplayReason.TOO_SHORT, length=length, at=self.at)
        return None

    def cause_of_other_gradient(
        self, ranks_gradient: Tensor, one_gradient: Tensor, facts: dict[str, Any]
    ) -> Comparison:
        """Explain a gradient that differs: in which parameters, and is it one factor?"""
        known = [
            pair for pair in self.gradients if pair.one_gradient.norm() > 1e-9 * one_gradient.norm()
        ]
        factors = [factor_between(pair) for pair in known]
        names = self.optimizer.names
        farthest = max(self.gradients, key=relative_distance)
        facts = facts | {
            "most_in": names[farthest.parameter],
            "shares": {names[pair.parameter]: relative_distance(pair) for pair in self.gradients},
        }
        if known:
            factor = sorted(factors)[len(factors) // 2]
            limit = max(self.limit, 1e-6)
            agreeing = [pair for pair in known if is_multiple(pair, factor, limit)]
            many = len(agreeing) > len(known) // 2
            if many and abs(factor - 1) > 1e-4:
                times = factor_in_words(factor, len(self.replay.records))
                facts |= {"factor": factor, "times": times}
                facts |= {"agreeing": len(agreeing), "parameters": len(known)}
                is_all = len(agreeing) == len(known)
                is_one_nth = abs(factor * len(self.replay.records) - 1) < 1e-3
                reduced_at = self.replay.observed.flags.get(Flag.REDUCES_WITHOUT_BACKWARD)
                if is_all and is_one_nth and reduced_at:
                    facts |= {"reduced_at": reduced_at}
                    return Comparison(Outcome.DIFFERENT, ReplayReason.ONE_NTH_OF_A_SUM, facts)
                if is_all and is_one_nth:
                    return Comparison(Outcome.DIFFERENT, ReplayReason.ONE_NTH, facts)
                reason = ReplayReason.FACTOR if is_all else ReplayReason.FACTOR_IN_SOME
                return Comparison(Outcome.DIFFERENT, reason, facts)
        return Comparison(Outcome.DIFFERENT, self.reason_of_difference(), facts)

    def reason_of_difference(self) -> Reason:
        if self.optimizer.compares_changes:
            return ReplayReason.CHANGE_DIFFERS
        gathers = [call for call in self.replay.observed.collectives if "gather" in call.name]
        if any(not call.library and not call.name.endswith("object") for call in gathers):
            return ReplayReason.GRADIENT_DIFFERS_GATHER
        return ReplayReason.GRADIENT_DIFFERS

    def compare_weights(self, apart: float) -> Comparison:
        """Compare the weights after the last step with those of one rank."""
        facts = {"apart": apart, "at": self.at, "limit": self.limit}
        if not self.steps:
            return Comparison(Outcome.EQUAL, ReplayReason.FIRST_GRADIENT_EQUAL, facts)
        steps = list(takewhile(weights_are_finite, self.steps))
        if not steps:
            return not_compared(ReplayReason.NOT_FINITE, **facts, step=1)
        if self.limit > FLOAT64_LIMIT:
            afters = [[self.without_rounding(own.weights_after) for own in pair] for pair in steps]
        else:
            afters = [[own.weights_after for own in pair] for pair in steps]
        change = distance(steps[-1][0].weights_after, steps[0][0].weights_before) or 1.0
        weights_apart = [distance(*after) / change for after in afters]
        facts |= {"steps": len(steps), "weights_apart": weights_apart[-1]}
        # A rounding error grows from step to step, and Adam divides by small gradients.
        if self.limit > FLOAT64_LIMIT:
            return self.compare_less_precisely(steps, weights_apart[-1], facts)
        if weights_apart[-1] <= 1e-5:
            return Comparison(Outcome.EQUAL, ReplayReason.EQUAL_TO_ONE, facts)
        return self.cause_of_other_weights(steps, weights_apart, facts)

    def compare_less_precisely(
        self, steps: list[tuple[OptimizerStep, OptimizerStep]], apart: float, facts: dict[str, Any]
    ) -> Comparison:
        """A mistake that begins later is larger at once; rounding grows."""
        before = 0.0
        for n, (ranks_step, one_step) in enumerate(steps, start=1):
            now = gradients_apart(ranks_step.gradients, one_step.gradients)
            if now > max(self.wrong_from, 30 * before):
                facts |= {"step": n, "apart": now, "epoch": ranks_step.epoch}
                return self.other_later_gradient(facts, ranks_step, one_step)
            before = max(before, now)
        if apart <= self.limit:
            return Comparison(Outcome.EQUAL, ReplayReason.EQUAL_LESS_PRECISE, facts)
        facts |= {"advice": self.advice}
        return Comparison(Outcome.TOO_CLOSE, ReplayReason.LITTLE_PRECISION, facts)

    def other_later_gradient(
        self, facts: dict[str, Any], ranks_step: OptimizerStep, one_step: OptimizerStep
    ) -> Comparison:
        batches = (ranks_step.epoch, ranks_step.batch), (one_step.epoch, one_step.batch)
        if batches[0] == batches[1] or self.replay.is_of_original:
            facts |= {"most_in": self.farthest_parameter(ranks_step.gradients, one_step.gradients)}
            before = distance(ranks_step.weights_before, one_step.weights_before)
            change = distance(ranks_step.weights_after, self.steps[0][0].weights_before)
            if before > self.wrong_from * change:
                return Comparison(Outcome.DIFFERENT, ReplayReason.WEIGHTS_CHANGED_BETWEEN, facts)
            facts |= {"at": place_of_loss(self.replay) or self.at}
            return Comparison(Outcome.DIFFERENT, ReplayReason.LATER_GRADIENT_DIFFERS, facts)
        facts |= {"batch": ranks_step.batch, "other": one_step.batch, "at": ranks_step.at}
        return Comparison(Outcome.MEANT_SO, ReplayReason.OTHER_BATCH, facts)

    def cause_of_other_weights(
        self,
        steps: list[tuple[OptimizerStep, OptimizerStep]],
        weights_apart: list[float],
        facts: dict[str, Any],
    ) -> Comparison:
        """A later gradient, rounding that the optimizer has made larger, or a mistake."""
        of_gradients = [
            gradients_apart(ranks_step.gradients, one_step.gradients)
            for ranks_step, one_step in steps
        ]
        for n, (gradient_apart, (ranks_step, one_step)) in enumerate(
            zip(of_gradients, steps, strict=True), start=1
        ):
            if gradient_apart > FLOAT64_WRONG:
                facts |= {"step": n, "apart": gradient_apart, "epoch": steps[n - 1][0].epoch}
                return self.other_later_gradient(facts, ranks_step, one_step)
        adapts = any(optimizer.is_adaptive for optimizer in self.replay.observed.optimizers)
        if adapts and weights_apart[0] <= 1e-5 and not other_change_between(steps, weights_apart):
            # A bias whose gradient is only rounding (before BatchNorm, of attention's keys) grows
            # from step to step, because the optimizer divides by that gradient. A mistake between
            # two steps would show in the gradient of the second.
            facts |= {"gradients_apart": max(of_gradients), "first_apart": weights_apart[0]}
            return Comparison(Outcome.EQUAL, ReplayReason.EQUAL_BUT_ROUNDING, facts)
        if max(weights_apart) <= FLOAT64_WRONG:
            return self.too_close(facts | {"step": len(steps), "apart": max(weights_apart)})
        step = next(n for n, far in enumerate(weights_apart) if far > FLOAT64_WRONG)
        most_in = self.farthest_parameter(*(own.weights_after for own in steps[step]))
        facts |= {"steps": step + 1, "weights_apart": weights_apart[step], "most_in": most_in}
        facts["epoch"] = steps[step][0].epoch
        return Comparison(Outcome.DIFFERENT, ReplayReason.WEIGHTS_OF_ONE_DIFFER, facts)


def is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def are_finite(projections: list[Projection]) -> bool:
    return all(is_finite(value) for value, _ in projections)


def weights_are_finite(pair: tuple[OptimizerStep, OptimizerStep]) -> bool:
    return all(are_finite(step.weights_after) for step in pair)


def other_change_between(
    steps: list[tuple[OptimizerStep, OptimizerStep]], weights_apart: list[float]
) -> bool:
    """Does the script itself part weights that were equal after a step, before the next one? A loss
    that is linear in them, as that of a critic, does not show it in the next gradient."""
    change = distance(steps[-1][0].weights_after, steps[0][0].weights_before) or 1.0
    return any(
        apart <= 1e-5
        and distance(ranks_step.weights_before, one_step.weights_before) > FLOAT64_WRONG * change
        for apart, (ranks_step, one_step) in zip(weights_apart, steps[1:], strict=False)
    )


def has_gradient(step: OptimizerStep) -> bool:
    """Has this step a gradient that is not zero?"""
    return any(gradient and gradient[1] != 0 for gradient in step.gradients)


def weights_differ(ranks_weights: list[list[Projection]]) -> bool:
    """Do any of these weights differ between the ranks?"""
    return any(differ(held) for held in zip(*ranks_weights, strict=False))


def factor_of_moments(pair: tuple[OptimizerStep, OptimizerStep]) -> float | None:
    """Find the factor between what step() has averaged and what one rank has.

    The moments show it, also where the weights hide it. None: there is none, or not one for all
    parameters.
    """
    for name in {name for moments in pair[0].moments for name in moments}:
        both = [
            (own[name], one[name])
            for own, one in zip(pair[0].moments, pair[1].moments, strict=False)
            if name in own and name in one and one[name][1] > 0
        ]
        factors = sorted(own[1] / one[1] for own, one in both)
        if not factors or factors[-1] - factors[0] > 1e-3 * factors[-1]:
            continue
        is_linear = all(abs(own[0] - factors[0] * one[0]) <= 1e-3 * own[1] for own, one in both)
        if is_linear and abs(factors[0] - 1) > 1e-3:
            return factors[0]
    return None


def factor_between(pair: Gradients) -> float:
    return float(pair.ranks_gradient @ pair.one_gradient / (pair.one_gradient @ pair.one_gradient))


def is_multiple(pair: Gradients, factor: float, limit: float) -> bool:
    distance_to_it = (pair.ranks_gradient - factor * pair.one_gradient).norm()
    return bool(distance_to_it <= limit * abs(factor) * pair.one_gradient.norm())


def comparisons(replay: Replay) -> list[Comparison]:
    """One Comparison per optimizer that stepped."""
    optimizers = replay.observed.optimizers
    numbers = [n for n, optimizer in enumerate(optimizers) if optimizer.steps]
    compared = [Comparer(replay, number).compare() for number in numbers]
    in_modules = [n for n in numbers if any(optimizers[n].keys)]
    if in_modules:  # beside these, each rank may hold its part of the masters
        compared = [
            each
            for n, each in zip(numbers, compared, strict=True)
            if n in in_modules or each.reason not in OF_OTHER_PARAMETERS
        ]
    if all(each.reason in OF_OTHER_PARAMETERS for each in compared):
        compared_outputs = compare_by_model(
            replay, compared[0].facts.get("at", optimizers[numbers[0]].at)
        )
        compared = [compared_outputs] if compared_outputs else compared
    is_zero = [each.reason == ReplayReason.NOTHING_TO_COMPARE for each in compared]
    if all(is_zero):
        return compared[:1]
    pairs = zip(compared, is_zero, strict=True)
    return one_of_each([each for each, zero in pairs if not zero])


def compare_by_model(replay: Replay, at: str) -> Comparison | None:
    """Compare the weights of the whole model, where optimizers hold only what their rank owns.

    These are the weights between the batches. None: they do not tell.
    """
    ranks_weights, one_weights = replay.observed.weights, replay.replayed.weights
    counts = sorted(ranks_weights.keys() & one_weights.keys())
    keys = [key for key in ranks_weights.get(0, {}) if key in one_weights.get(0, {})]
    states = [
        [[run[count][key] for key in keys] for run in (ranks_weights, one_weights)]
        for count in counts
    ]
    by_step = {
        n: distance(*after) / distance(before[0], after[0])
        for n, (before, after) in enumerate(pairwise(states), start=1)
        if all(map(distance, before, after))
    }
    if len(by_step) < FEWEST_STEPS or distance(*states[0]) > 0:
        return None
    apart = max(by_step.values())
    facts = {"steps": len(by_step), "weights_apart": apart, "apart": apart, "at": at}
    if apart <= WEIGHTS_LIMIT:
        return Comparison(Outcome.EQUAL, ReplayReason.EQUAL_AFTER_STEP, facts)
    if apart <= HIDDEN_FACTOR_LIMIT:
        return None
    step = next(n for n, value in by_step.items() if value > HIDDEN_FACTOR_LIMIT)
    far = [abs(own - one) for (own, _), (one, _) in zip(*states[step], strict=True)]
    most_in = keys[far.index(max(far))].partition(": ")[2]
    facts |= {"step": step, "most_in": most_in, "weights_apart": by_step[step]}
    return Comparison(Outcome.DIFFERENT, ReplayReason.STEP_DIFFERS, facts)


def one_of_each(compared: list[Comparison]) -> list[Comparison]:
    """Keep the farthest of the optimizers that one line steps and that differ for one reason."""
    groups: dict[tuple, list[Comparison]] = {}
    for each in compared:
        key = (each.outcome, each.reason, each.facts.get("at"), each.facts.get("times"))
        groups.setdefault(key, []).append(each)
    return [max(group, key=apart_of) for group in groups.values()]


def apart_of(compared: Comparison) -> float:
    return float(compared.facts.get("apart", 0.0))


def worst(compared: list[Comparison]) -> Outcome:
    return min((each.outcome for each in compared), key=list(Outcome).index)


def farthest(compared: list[Comparison]) -> float:
    return max(map(apart_of, compared), default=0.0)


def relative_distance(pair: Gradients) -> float:
    return float(
        (pair.ranks_gradient - pair.one_gradient).norm() / (pair.one_gradient.norm() + 1e-30)
    )


def distance(projections: list, others: list) -> float:
    """Measure how far two lists of tensors are apart, as far as their projections tell."""
    pairs = zip(projections, others, strict=False)
    return float(sum((value - other) ** 2 for (value, _), (other, _) in pairs) ** 0.5)


def gradients_apart(gradients: list, others: list) -> float:
    """How far two gradients are apart, in units of their length."""
    pairs = zip(gradients, others, strict=False)
    known = [pair for pair in pairs if None not in pair]
    length = sum(norm**2 for _, (_, norm) in known) ** 0.5
    return distance([own for own, _ in known], [other for _, other in known]) / (length or 1.0)


def factor_in_words(factor: float, world_size: int) -> str:
    n = world_size
    names = {n: f"{n} times", 1 / n: f"1/{n} of", n**2: f"{n**2} times"}
    near = [name for value, name in names.items() if abs(factor - value) < 1e-3 * value]
    return near[0] if near else f"{factor:.4g} times"


def numbers_differ(values: list[float], others: list[float], limit: float = 1e-6) -> bool:
    pairs = zip(values, others, strict=False)
    return any(abs(value - other) > limit * (abs(value) + abs(other)) for value, other in pairs)
