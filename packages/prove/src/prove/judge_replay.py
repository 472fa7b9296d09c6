"""Does one rank compute what all ranks compute? This is the proof; all other rows explain it.

Compared are the gradients of all steps, the weights after the last one, learning rates, and printed
numbers: `of_ranks` is what all ranks have, `of_one` what one rank has.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prove.draws import Finding
from prove.judge_effects import error_of
from prove.processes import RunOutcome
from prove.rank_record import (
    Ended,
    OptimizerRecord,
    OptimizerStep,
    RankRecord,
    gradients_file,
    tensors_file,
)
from prove.reasons import Reason
from prove.table import Check, ReportRow, not_seen, right, warning, wrong

SMALL_BATCH = 16  # values per channel from which BatchNorm's statistics are good enough
FLOAT64_LIMIT = 1e-9  # how far rounding can bring equal gradients apart, in units of their length
FLOAT64_WRONG = 1e-4  # what differs less may be rounding that has grown: no verdict
SMALLEST_LENGTH = 1e-12  # a gradient that is shorter is rounding itself


class Replay:
    """A finished replay, beside the run of all ranks that it replays."""

    def __init__(
        self, observed: RunOutcome, outcome: RunOutcome, folder: str, names: tuple[str, str]
    ) -> None:
        """names: of the run of all ranks, and of the replay."""
        self.name = names[1]
        self.records = observed.records
        self.observed = observed.records[0]
        self.error = error_of(outcome) if outcome.status else ""
        self.wrote_record = bool(outcome.records)
        self.replayed = outcome.records[0] if outcome.records else RankRecord()
        self.stepped = self.replayed.steps > 0 and self.replayed.ended != Ended.NOT_YET
        of_ranks, of_one = (gradients_file(folder, name, 0) for name in names)
        self.gradients_of_ranks = torch.load(of_ranks, weights_only=True)
        self.gradients_of_one: dict = {}
        self.coins: dict = {}  # draws.Draw by key: what the ranks have decided differently
        self.rows: dict = {}  # draws.OneDraw by key: what each sample had for itself
        if self.stepped:
            self.gradients_of_one = torch.load(of_one, weights_only=True)
            tensors = torch.load(tensors_file(folder, names[1], 0), weights_only=False)
            self.coins, self.rows = tensors["coins"], tensors["rows"]

    def steps(self, number: int) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """The steps of an optimizer: of all ranks, of one rank."""
        runs = self.observed, self.replayed
        if any(number >= len(run.optimizers) for run in runs):
            return []
        return list(zip(*(run.optimizers[number].steps for run in runs), strict=False))

    def gradients(self, number: int) -> list["Gradients"]:
        """Of the first step of an optimizer."""
        both = (self.gradients_of_ranks, self.gradients_of_one)
        tensors = zip(*(gradients.get(number, []) for gradients in both), strict=False)
        pairs = [Gradients(parameter, *pair) for parameter, pair in enumerate(tensors)]
        return [pair for pair in pairs if pair.of_ranks is not None and pair.of_one is not None]

    def takes_more_batches(self) -> bool:
        """One rank takes the batches of several steps for one step: accumulation was divided."""
        if not self.stepped:
            return self.wrote_record and not self.replayed.steps and not self.replayed.error
        of_ranks, of_one = (
            [optimizer.steps[0].batch for optimizer in run.optimizers if optimizer.steps]
            for run in (self.observed, self.replayed)
        )
        backwards, backwards_of_one = (
            sum(backward.steps_before == 0 for backward in run.backwards)
            for run in (self.observed, self.replayed)
        )
        later = bool(of_ranks and of_one) and of_one[0] > of_ranks[0]
        return later or backwards_of_one >= backwards * len(self.records) > 0

    def places_of_draws(self, finding: str) -> list[str]:
        """Of which this was found, in any of the runs."""
        records = [*self.records, self.replayed]
        places = [place for record in records for place in record.draws.get(finding, [])]
        return list(dict.fromkeys(places))


class Gradients(NamedTuple):
    """Of one parameter, at the first step."""

    parameter: int
    of_ranks: Tensor
    of_one: Tensor


class Outcome(Enum):
    EQUAL = "equal"
    TOO_CLOSE = "too close to tell"
    DIFFERENT = "different"
    MEANT_SO = "different, as may be meant"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Comparison:
    """What an optimizer's steps are on all ranks and on one. facts: the numbers behind it."""

    outcome: Outcome
    reason: Reason
    facts: dict[str, Any] = field(default_factory=dict)

    def row(self, check: str) -> ReportRow:
        if self.outcome == Outcome.EQUAL:
            return right(check, self.reason, **self.facts)
        if self.outcome == Outcome.DIFFERENT:
            return wrong(check, self.reason, **self.facts)
        if self.outcome == Outcome.MEANT_SO:
            return warning(check, self.reason, **self.facts)
        return not_seen(check, self.reason, **self.facts)


class Comparer:
    """Compares the steps of one optimizer."""

    def __init__(self, replay: Replay, number: int) -> None:
        self.replay, self.number = replay, number
        self.optimizer: OptimizerRecord = replay.observed.optimizers[number]
        self.gradients = replay.gradients(number)
        self.steps = self.comparable_steps()

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {pair.of_ranks.dtype for pair in self.gradients}

    @property
    def limit(self) -> float:
        """How far rounding alone can bring two equal gradients apart, in units of their length."""
        if self.dtypes & {torch.bfloat16, torch.float16}:
            return 5e-2
        if torch.float32 in self.dtypes:
            return 3e-2 if self.replay.observed.uses_autocast else 3e-3
        return FLOAT64_LIMIT

    @property
    def wrong_from(self) -> float:
        return FLOAT64_WRONG if self.limit == FLOAT64_LIMIT else 5 * self.limit

    @property
    def at(self) -> str:
        return self.optimizer.steps[0].at

    def comparable_steps(self) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """Until the local batches are not equal any more."""
        steps = []
        for n, (of_ranks, of_one) in enumerate(self.replay.steps(self.number)):
            own = [
                record.optimizers[self.number].steps[n]
                for record in self.replay.records
                if n < len(record.optimizers[self.number].steps)
            ]
            sizes = {step.batch_size for step in own}
            if len(sizes) > 1 or not of_one.weights_after or not of_ranks.weights_after:
                break
            steps.append((of_ranks, of_one))
        return steps

    def compare(self) -> Comparison:
        if obstacle := self.obstacle():
            return obstacle
        of_ranks = torch.cat([pair.of_ranks.double().flatten() for pair in self.gradients])
        of_one = torch.cat([pair.of_one.double().flatten() for pair in self.gradients])
        apart = float((of_ranks - of_one).norm()) / float(of_one.norm() or of_ranks.norm())
        if apart <= self.limit:
            return self.compare_weights(apart)
        facts = {"apart": apart, "step": 1, "at": self.at}
        if apart <= self.wrong_from:
            in_float64 = self.limit == FLOAT64_LIMIT
            reason = Reason.TOO_CLOSE if in_float64 else Reason.TOO_CLOSE_IN_FLOAT32
            return Comparison(Outcome.TOO_CLOSE, reason, facts)
        return self.difference(of_ranks, of_one, facts)

    def obstacle(self) -> Comparison | None:
        """Why the two runs cannot be compared."""

        def not_compared(reason: Reason, **facts: Any) -> Comparison:
            return Comparison(Outcome.NOT_COMPARED, reason, facts)

        replay, other_shapes = self.replay, self.replay.replayed.other_shapes
        names = self.optimizer.names
        if self.number in other_shapes or any(
            pair.of_ranks.shape != pair.of_one.shape for pair in self.gradients
        ):
            for parameter, of_ranks, of_one in other_shapes.get(self.number, [])[:1]:
                name = names[parameter]
                return not_compared(Reason.OTHER_SHAPE, name=name, of_ranks=of_ranks, of_one=of_one)
            return not_compared(Reason.OTHER_PARAMETERS)
        if not self.gradients and self.optimizer.begins_later:
            return not_compared(Reason.BEGINS_LATER, at=self.at)
        if not self.gradients:
            return not_compared(Reason.NO_GRADIENTS)
        if replay.replayed.batchnorm_rows_unknown:
            return not_compared(Reason.BATCHNORM_ROWS)
        if self.dtypes != {pair.of_one.dtype for pair in self.gradients}:
            of_one = sorted({str(pair.of_one.dtype) for pair in self.gradients})
            of_ranks = sorted(map(str, self.dtypes))
            return not_compared(Reason.OTHER_DTYPES, of_ranks=of_ranks, of_one=of_one)
        both = [tensor for pair in self.gradients for tensor in (pair.of_ranks, pair.of_one)]
        if not all(bool(tensor.isfinite().all()) for tensor in both):
            return not_compared(Reason.NOT_FINITE, step=1, at=self.at)
        length = max(float(tensor.double().norm()) for tensor in both)
        if length == 0:
            return not_compared(Reason.NOTHING_TO_COMPARE)
        if length < SMALLEST_LENGTH:
            return not_compared(Reason.TOO_SHORT, length=length, at=self.at)
        return None

    def difference(self, of_ranks: Tensor, of_one: Tensor, facts: dict[str, Any]) -> Comparison:
        """In which parameters, and is it one factor?"""
        known = [pair for pair in self.gradients if pair.of_one.norm() > 1e-9 * of_one.norm()]
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
                if is_all and is_one_nth:
                    return Comparison(Outcome.DIFFERENT, Reason.ONE_NTH, facts)
                reason = Reason.FACTOR if is_all else Reason.FACTOR_IN_SOME
                return Comparison(Outcome.DIFFERENT, reason, facts)
        return Comparison(Outcome.DIFFERENT, self.reason_of_difference(), facts)

    def reason_of_difference(self) -> Reason:
        if self.optimizer.compares_changes:
            return Reason.CHANGE_DIFFERS
        gathers = [call for call in self.replay.observed.collectives if "gather" in call.name]
        if any(not call.name.endswith("object") for call in gathers):
            return Reason.GRADIENT_DIFFERS_GATHER
        return Reason.GRADIENT_DIFFERS

    def compare_weights(self, apart: float) -> Comparison:
        """After the last step: are the weights those of one rank?"""
        steps, facts = self.steps, {"apart": apart, "at": self.at, "limit": self.limit}
        if not steps:
            return Comparison(Outcome.EQUAL, Reason.FIRST_GRADIENT_EQUAL, facts)
        numbers = [
            value for pair in steps for value, _ in (*pair[0].weights_after, *pair[1].weights_after)
        ]
        if not all(map(is_finite, numbers)):
            steps = steps[: next(n for n, pair in enumerate(steps) if not weights_are_finite(pair))]
            if not steps:
                return Comparison(Outcome.NOT_COMPARED, Reason.NOT_FINITE, facts | {"step": 1})
        change = distance(steps[-1][0].weights_after, steps[0][0].weights_before) or 1.0
        weights_apart = [
            distance(of_ranks.weights_after, of_one.weights_after) / change
            for of_ranks, of_one in steps
        ]
        of_gradients = [
            gradients_apart(of_ranks.gradients, of_one.gradients) for of_ranks, of_one in steps
        ]
        facts |= {"steps": len(steps), "weights_apart": weights_apart[-1]}
        # A rounding error grows from step to step, and Adam divides by small gradients.
        if weights_apart[-1] <= max(1e4 * self.limit, 1e-5):
            in_float64 = self.limit == FLOAT64_LIMIT
            reason = Reason.EQUAL_TO_ONE if in_float64 else Reason.EQUAL_LESS_PRECISE
            return Comparison(Outcome.EQUAL, reason, facts)
        if self.limit > FLOAT64_LIMIT:
            return Comparison(Outcome.TOO_CLOSE, Reason.LITTLE_PRECISION, facts)
        for n, gradient_apart in enumerate(of_gradients, start=1):
            if gradient_apart > FLOAT64_WRONG:
                facts |= {"step": n, "apart": gradient_apart}
                return Comparison(Outcome.DIFFERENT, Reason.LATER_GRADIENT_DIFFERS, facts)
        if self.optimizer.is_adaptive and weights_apart[0] <= 1e-5:
            # A bias whose gradient is only rounding (before BatchNorm, of attention's keys) grows
            # from step to step, because the optimizer divides by that gradient. A mistake between
            # two steps would show in the gradient of the second.
            facts |= {"gradients_apart": max(of_gradients), "first_apart": weights_apart[0]}
            return Comparison(Outcome.EQUAL, Reason.EQUAL_BUT_ROUNDING, facts)
        if max(weights_apart) <= FLOAT64_WRONG:
            return Comparison(Outcome.TOO_CLOSE, Reason.TOO_CLOSE, facts | {"step": len(steps)})
        return Comparison(Outcome.DIFFERENT, Reason.WEIGHTS_OF_ONE_DIFFER, facts)


def is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def weights_are_finite(pair: tuple[OptimizerStep, OptimizerStep]) -> bool:
    return all(is_finite(value) for step in pair for value, _ in step.weights_after)


def factor_between(pair: Gradients) -> float:
    of_ranks, of_one = (tensor.double().flatten() for tensor in (pair.of_ranks, pair.of_one))
    return float(of_ranks @ of_one / (of_one @ of_one))


def is_multiple(pair: Gradients, factor: float, limit: float) -> bool:
    distance_to_it = (pair.of_ranks.double() - factor * pair.of_one.double()).norm()
    return bool(distance_to_it <= limit * abs(factor) * pair.of_one.double().norm())


def comparisons(replay: Replay) -> list[Comparison]:
    """Of each optimizer that made a step."""
    optimizers = replay.observed.optimizers
    numbers = [
        n
        for n, optimizer in enumerate(optimizers)
        if optimizer.steps and not is_made_again(optimizer, optimizers[:n])
    ]
    compared = [Comparer(replay, number).compare() for number in numbers]
    is_zero = [each.reason == Reason.NOTHING_TO_COMPARE for each in compared]
    if all(is_zero):
        return compared[:1]
    return [each for each, zero in zip(compared, is_zero, strict=True) if not zero]


def is_made_again(optimizer: OptimizerRecord, earlier: list[OptimizerRecord]) -> bool:
    """For each epoch: one that has made steps with these parameters is compared already."""
    names = {*optimizer.names}
    return optimizer.begins_later and any(
        other.steps and not other.begins_later and names <= {*other.names} for other in earlier
    )


def worst(compared: list[Comparison]) -> Outcome:
    outcomes = [each.outcome for each in compared]
    order = (Outcome.DIFFERENT, Outcome.NOT_COMPARED, Outcome.TOO_CLOSE, Outcome.EQUAL)
    return next(outcome for outcome in order if outcome in outcomes)


def farthest(compared: list[Comparison]) -> float:
    return max((float(each.facts.get("apart", 0.0)) for each in compared), default=0.0)


class Reproduction(NamedTuple):
    """All ranks ran again, fed their own records: did they compute the same?"""

    apart: float  # the farthest of all gradients, in units of their length
    rank: int
    step: int
    at: str


def reproduction(observed: list[RankRecord], control: list[RankRecord]) -> Reproduction | None:
    """None: the control did not come so far."""
    apart = Reproduction(0.0, 0, 1, "")
    if len(control) != len(observed):
        return None
    for own, again in zip(observed, control, strict=True):
        if not again.steps or again.error:
            return None
        for optimizer, other in zip(own.optimizers, again.optimizers, strict=False):
            pairs = list(zip(optimizer.steps, other.steps, strict=False))
            for n, (step, step_again) in enumerate(pairs, start=1):
                new = gradients_apart(step.gradients, step_again.gradients)
                if not any(step.gradients):
                    change = distance(step.weights_after, step.weights_before) or 1.0
                    new = distance(step.weights_after, step_again.weights_after) / change
                if new > apart.apart:
                    apart = Reproduction(new, own.rank, n, step.at)
    return apart


def is_sum_over_local_batch(replay: Replay, sequence: Replay) -> bool:
    """Rank 0 computed from its own batch what one rank computes from it: the loss did not know
    of the ranks, and is a sum. With a batch size per rank, this may be meant so."""
    sizes = [
        loader_run.batch_size for loader_run in replay.observed.loader_runs if loader_run.steps
    ]
    if not sequence.stepped or not sizes or sequence.replayed.own_batch_size != sizes[0]:
        return False
    steps = sequence.steps(0)
    if not steps:
        return False
    of_rank_0, of_one = (
        [gradient or 0.0 for gradient in step.local_gradients] for step in steps[0]
    )
    return not any_differs(of_rank_0, of_one, limit=1e-3)


def unsure_draws(replay: Replay) -> Comparison | None:
    """Random numbers that one rank was not given, so that a difference says nothing."""
    reasons = {
        Finding.OPAQUE: Reason.DRAWS_IN_KERNEL,
        Finding.TOO_MANY: Reason.TOO_MANY_DRAWS,
        Finding.ESCAPED: Reason.DRAWS_ESCAPED,
        Finding.NOT_MATCHED: Reason.DRAWS_NOT_MATCHED,
    }
    for finding, reason in reasons.items():
        if places := replay.places_of_draws(finding):
            return Comparison(Outcome.NOT_COMPARED, reason, {"places": places})
    return None


def draws_not_given(replay: Replay, rows: list[ReportRow]) -> Comparison | None:
    """Without a loader, the original gets no draws of the ranks: nobody knows when they are due."""
    of_draws = (Check.RANDOM_DECISIONS, Check.RANDOM_NUMBERS)
    places = [at for row in rows if row.check in of_draws for at in row.facts["places"]]
    if not places or any(run.steps for run in replay.observed.loader_runs):
        return None
    return Comparison(Outcome.NOT_COMPARED, Reason.DRAWS_NOT_GIVEN, {"places": places})


def relative_distance(pair: Gradients) -> float:
    return float((pair.of_ranks - pair.of_one).norm() / (pair.of_one.norm() + 1e-30))


def distance(projections: list, others: list) -> float:
    """Between two lists of tensors, as far as their projections tell."""
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


def any_differs(values: list[float], others: list[float], limit: float = 1e-6) -> bool:
    pairs = zip(values, others, strict=False)
    return any(abs(value - other) > limit * (abs(value) + abs(other)) for value, other in pairs)


def draw_rows(replay: Replay) -> list[ReportRow]:
    """What the ranks draw inside a step."""
    rows = []
    if places := replay.places_of_draws(Finding.COIN):
        rows.append(warning(Check.RANDOM_DECISIONS, Reason.COIN_BY_RANK, places=places))
    same = replay.places_of_draws(Finding.SAME_NOISE)
    of_dropout = replay.observed.dropout  # it has a row of its own
    by_sample = [at for at in replay.places_of_draws(Finding.BY_SAMPLE) if at not in same]
    if places := [at for at in same if at not in of_dropout]:
        rows.append(warning(Check.RANDOM_NUMBERS, Reason.SAME_NOISE, places=places))
    elif places := by_sample:
        rows.append(right(Check.RANDOM_NUMBERS, Reason.NOISE_BY_SAMPLE, places=places))
    return rows


def batchnorm_rows(replay: Replay, whole_batch_replay: Replay | None) -> list[ReportRow]:
    """Layers that normalize each local batch, and what a batch of all ranks would change."""
    values = smallest_batchnorm(replay.observed)
    if not values:
        return []
    facts = {"layers": next(iter(replay.observed.batchnorm)), "values": values}
    if whole_batch_replay is None or not whole_batch_replay.stepped:
        return [right("batchnorm", Reason.BATCHNORM_OF_EACH_RANK, **facts)]
    gradients = whole_batch_replay.gradients(0)
    apart = sum(float((pair.of_ranks - pair.of_one).norm()) ** 2 for pair in gradients) ** 0.5
    length = sum(float(pair.of_one.norm()) ** 2 for pair in gradients) ** 0.5 or 1.0
    return [warning("batchnorm", Reason.BATCHNORM_OF_FEW, apart=apart / length, **facts)]


def smallest_batchnorm(record: RankRecord) -> int:
    """How many values per channel the smallest local BatchNorm normalizes; 0: there is none."""
    return min(record.batchnorm.values(), default=0)


def why_not_replayed(replay: Replay) -> Comparison | None:
    """A replay that fails says nothing about the script, but why."""
    error, record = replay.replayed.error, replay.replayed

    def not_compared(reason: Reason, **facts: Any) -> Comparison:
        return Comparison(Outcome.NOT_COMPARED, reason, facts)

    if error is not None:
        if error.kind == "CannotMergeError":
            return not_compared(Reason.CANNOT_MERGE, what=error.message)
        text = error.message[:160]
        return not_compared(Reason.REPLAY_FAILS, kind=error.kind, at=error.at, message=text)
    if replay.wrote_record and record.world_size > 1:
        return not_compared(Reason.NOT_ONE_RANK, world_size=record.world_size)
    if not replay.stepped:
        reason = Reason.NO_REPLAYED_STEP if not replay.error else Reason.REPLAY_SAYS
        return not_compared(reason, message=replay.error)
    return None
