"""Does one rank compute what all ranks compute? This is the proof; all other rows explain it.

Compared are the gradient of the first step, the weights after the last one, learning rates, and
printed numbers: `of_ranks` is what all ranks have, `of_one` what one rank has.
"""

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prove.judge_effects import NUMBER, error_of
from prove.judge_model import parameter_names
from prove.launch import RunOutcome
from prove.reasons import Phrase, Reason
from prove.record import Ended, Mode, OptimizerRecord, OptimizerStep, RankRecord, gradients_file
from prove.table import ReportRow, not_seen, part, right, warning, wrong

SMALL_BATCH = 16  # values per channel from which BatchNorm's statistics are good enough
FLOAT64_LIMIT = 1e-9  # how far rounding can bring equal gradients apart, in units of their length
RANDOM = "the step draws random numbers"
CURE = "what the loss divides by must be a number of all ranks, not of one; or a layer mixes the "
CURE += "samples of a batch (attention over the batch)"
STATISTIC = re.compile(
    r"(loss|acc\w*|accuracy|error|top.?[15]|mAP|ppl|perplexity|correct)\W{0,12}"
    rf"({NUMBER.pattern})",
    re.I,
)


class Gradients(NamedTuple):
    """Of one parameter, at the first step."""

    parameter: int
    of_ranks: Tensor
    of_one: Tensor


class Replay:
    """A finished replay, beside the run that it replays."""

    def __init__(self, observed: RunOutcome, outcome: RunOutcome, folder: str, mode: str) -> None:
        self.mode, self.ranks = mode, observed.records
        self.observed = observed.records[0]
        self.error = error_of(outcome) if outcome.status else ""
        self.wrote_record = bool(outcome.records)
        self.replayed = outcome.records[0] if outcome.records else RankRecord()
        self.stepped = self.replayed.steps > 0 and self.replayed.ended != Ended.NOT_YET
        of_ranks, of_one = (gradients_file(folder, each, 0) for each in (Mode.OBSERVE, mode))
        self.gradients_of_ranks = torch.load(of_ranks, weights_only=True)
        self.gradients_of_one = torch.load(of_one, weights_only=True) if self.stepped else {}

    def steps(self, number: int) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """The steps of an optimizer: of all ranks, of one rank."""
        runs = self.observed, self.replayed
        return list(zip(*(run.optimizers[number].steps for run in runs), strict=False))

    def gradients(self, number: int) -> list[Gradients]:
        """Of the first step of an optimizer."""
        both = (self.gradients_of_ranks, self.gradients_of_one)
        tensors = zip(*(gradients.get(number, []) for gradients in both), strict=False)
        pairs = [Gradients(parameter, *pair) for parameter, pair in enumerate(tensors)]
        return [pair for pair in pairs if pair.of_ranks is not None and pair.of_one is not None]

    def equals(self, other: "Replay") -> bool:
        """Two replays computed the same gradients in all steps."""
        if not other.stepped:
            return False
        optimizers = zip(self.replayed.optimizers, other.replayed.optimizers, strict=False)
        for own, others in optimizers:
            for step, other_step in zip_longest(own.steps, others.steps):
                if step is None or other_step is None:
                    return False
                if gradients_apart(step.gradients, other_step.gradients) >= FLOAT64_LIMIT:
                    return False
        return True

    def takes_more_batches(self) -> bool:
        """One rank takes the batches of several steps for one step: accumulation was divided."""
        if not self.stepped:
            return self.wrote_record and not self.replayed.steps
        of_ranks, of_one = (
            [optimizer.steps[0].batch for optimizer in run.optimizers if optimizer.steps]
            for run in (self.observed, self.replayed)
        )
        backwards, backwards_of_one = (
            sum(backward.steps_before == 0 for backward in run.backwards)
            for run in (self.observed, self.replayed)
        )
        later = bool(of_ranks and of_one) and of_one[0] > of_ranks[0]
        return later or backwards_of_one >= backwards * len(self.ranks) > 0


@dataclass
class Comparison:
    """The gradient of one optimizer's first step, on all ranks and on one rank."""

    replay: Replay
    check: str
    number: int
    optimizer: OptimizerRecord
    gradients: list[Gradients]
    explained: bool  # by rows above: the ranks do not train one model

    @property
    def limit(self) -> float:
        """How far rounding alone can bring two equal gradients apart, in units of their length."""
        dtypes = {pair.of_ranks.dtype for pair in self.gradients}
        if dtypes & {torch.bfloat16, torch.float16}:
            return 5e-2
        if torch.float32 in dtypes:
            return 3e-2 if self.replay.observed.uses_autocast else 3e-3
        return FLOAT64_LIMIT

    @property
    def at(self) -> str:
        return self.optimizer.steps[0].at

    def row(self, sequence: Replay | None) -> ReportRow:
        of_ranks = torch.cat([pair.of_ranks.double().flatten() for pair in self.gradients])
        of_one = torch.cat([pair.of_one.double().flatten() for pair in self.gradients])
        apart = float((of_ranks - of_one).norm()) / float(of_one.norm() or of_ranks.norm())
        if apart <= self.limit:
            text = f"gradient of step 1 equal to {apart:.0e} of its length"
            if self.limit > FLOAT64_LIMIT:
                text += f" (not in float64: less than {percent(self.limit)} is not seen)"
            return self.row_of_weights(text)
        factor = float(of_ranks @ of_one / (of_one @ of_one)) if of_one.any() else 0.0
        unexplained = (
            float((of_ranks - factor * of_one).norm() / of_ranks.norm()) if of_ranks.any() else 1
        )
        if unexplained < max(self.limit, 1e-6) and abs(factor - 1) > 1e-4:
            text = f"the gradient is {multiple(factor, len(self.replay.ranks))} that of one rank"
        else:
            farthest = max(self.gradients, key=relative_distance).parameter
            text = f"the gradient differs by {percent(apart)} of its length from that of one rank, "
            text += f"most in {parameter_names(self.optimizer, [farthest])}"
        text = f"{text} ({self.at})"
        if doubt := self.doubt(text):
            return not_seen(self.check, doubt)
        if unexplained >= 1e-3 or abs(factor * len(self.replay.ranks) - 1) >= 1e-3:
            return wrong(self.check, text, CURE, See.LOSS)
        if sequence is not None and self.is_sum_over_local_batch(sequence):
            text += ": the loss is a sum, or is divided by a constant, and DDP takes the mean of it"
            cure = "take the mean; meant so only if the rate was chosen for the sum over one rank"
            return warning(self.check, text, cure, See.LOSS)
        text += ": a sum where a mean belongs, or divided by the number of ranks once more"
        return wrong(self.check, text, CURE, See.LOSS)

    def doubt(self, text: str) -> str:
        """Why a difference between the runs does not show a mistake."""
        observed = self.replay.observed
        if observed.steps_with_random_numbers:
            return f"{RANDOM}: no verdict. {text}"
        if observed.samples_elsewhere:
            reason = "so ranks cannot be put together"
            return f"the first dimension of a batch is not its samples, {reason}"
        if (
            not any(loader_run.steps for loader_run in observed.loader_runs)
            and not observed.model_returns_loss
        ):
            return "no DataLoader, and the loss is computed outside of the model: nothing to replay"
        return f"{text}, as follows from the rows above" if self.explained else ""

    def comparable_steps(self) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """Until the local batches are not equal any more."""
        steps = []
        for n, (of_ranks, of_one) in enumerate(self.replay.steps(self.number)):
            own = [rank.optimizers[self.number].steps[n] for rank in self.replay.ranks]
            sizes = {step.batch_size for step in own}
            if len(sizes) > 1 or not of_one.weights_after:
                break
            steps.append((of_ranks, of_one))
        return steps

    def row_of_weights(self, text: str) -> ReportRow:
        """After the last step: are the weights those of one rank?"""
        steps = self.comparable_steps()
        if not steps:
            return right(self.check, text)
        first_weights = steps[0][0].weights_before
        change = distance(steps[-1][0].weights_after, first_weights) or 1.0
        apart = [
            distance(of_ranks.weights_after, of_one.weights_after) / change
            for of_ranks, of_one in steps
        ]
        text += f", weights after step {len(steps)} to {apart[-1]:.0e} of their change"
        # A rounding error grows from step to step, and Adam divides by small gradients.
        if apart[-1] <= max(1e4 * self.limit, 1e-5):
            return right(self.check, text)
        if doubt := self.doubt(text):
            return not_seen(self.check, doubt)
        if self.limit > FLOAT64_LIMIT:
            return not_seen(self.check, f"{text}: too little precision to tell")
        of_gradients = [
            gradients_apart(of_ranks.gradients, of_one.gradients) for of_ranks, of_one in steps
        ]
        for n, gradient_apart in enumerate(of_gradients, start=1):
            if gradient_apart > 1e-6:
                text = f"the gradient of step {n} differs by {percent(gradient_apart)} of its "
                text += f"length from that of one rank ({self.at})"
                return wrong(self.check, text, CURE, See.LOSS)
        if self.optimizer.is_adaptive and apart[0] <= 1e-5:
            # A bias whose gradient is only rounding (before BatchNorm, of attention's keys) grows
            # from step to step, because the optimizer divides by that gradient. A mistake between
            # two steps would show in the gradient of the second.
            text += f", though all gradients agree to {max(of_gradients):.0e}, and the weights "
            text += f"after step 1 to {apart[0]:.0e}: rounding, divided by rounding"
            return right(self.check, text)
        cure = "something between backward and step depends on the ranks"
        return wrong(self.check, f"{text} ({self.at})", cure, See.LOSS)

    def is_sum_over_local_batch(self, sequence: Replay) -> bool:
        """Rank 0 computed from its own batch what one rank computes from it: the loss did not know
        of the ranks, and is a sum. With a batch size per rank, this may be meant so."""
        sizes = [
            loader_run.batch_size
            for loader_run in self.replay.observed.loader_runs
            if loader_run.steps
        ]
        if not sequence.stepped or not sizes or sequence.replayed.own_batch_size != sizes[0]:
            return False
        of_rank_0, of_one = (
            [gradient or 0.0 for gradient in step.local_gradients]
            for step in sequence.steps(self.number)[0]
        )
        return not far(of_rank_0, of_one, limit=1e-3)


def gradient_rows(
    replay: Replay, check: str, explained: bool = False, sequence: Replay | None = None
) -> list[ReportRow]:
    rows = []
    for number, optimizer in enumerate(replay.observed.optimizers):
        gradients = replay.gradients(number)
        other_shapes = replay.replayed.other_shapes.get(number, [])
        holds_others = number in replay.replayed.other_shapes
        holds_others |= any(pair.of_ranks.shape != pair.of_one.shape for pair in gradients)
        if holds_others and optimizer.steps:
            text = "the one rank's optimizer holds other parameters"
            for parameter, of_ranks, of_one in other_shapes[:1]:
                text += f": {parameter_names(optimizer, [parameter])} has the shape {of_ranks}, "
                text += f"and {of_one} on one rank; it must not depend on the batch size"
            rows.append(not_seen(check, text))
        elif any(pair.of_ranks.any() or pair.of_one.any() for pair in gradients):
            comparison = Comparison(replay, check, number, optimizer, gradients, explained)
            rows.append(comparison.row(sequence))
    return rows or [not_seen(check, "all gradients are zero: there is nothing to compare")]


def relative_distance(pair: Gradients) -> float:
    return float((pair.of_ranks - pair.of_one).norm() / (pair.of_one.norm() + 1e-30))


def distance(projections: list, others: list) -> float:
    """Between two lists of tensors, as far as their projections tell."""
    pairs = zip(projections, others, strict=True)
    return float(sum((value - other) ** 2 for (value, _), (other, _) in pairs) ** 0.5)


def gradients_apart(gradients: list, others: list) -> float:
    """How far two gradients are apart, in units of their length."""
    pairs = zip(gradients, others, strict=False)
    known = [pair for pair in pairs if None not in pair]
    length = sum(norm**2 for _, (_, norm) in known) ** 0.5
    return distance([own for own, _ in known], [other for _, other in known]) / (length or 1.0)


def multiple(factor: float, ranks: int) -> str:
    names = {ranks: f"{ranks} times", 1 / ranks: f"1/{ranks} of", ranks**2: f"{ranks**2} times"}
    near = [name for value, name in names.items() if abs(factor - value) < 1e-3 * value]
    return near[0] if near else f"{factor:.4g} times"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1e}"


def far(values: list[float], others: list[float], limit: float = 1e-6) -> bool:
    pairs = zip(values, others, strict=False)
    return any(abs(value - other) > limit * (abs(value) + abs(other)) for value, other in pairs)


def schedule_rows(replay: Replay) -> list[ReportRow]:
    """The learning rates that the script gives one rank, at the same steps."""
    observed, replayed = replay.observed, replay.replayed
    compared = [  # rates, when, and the reason if they differ
        (of_ranks.learning_rates, of_one.learning_rates,
         part(Phrase.AT_STEP, step=n, at=of_ranks.at), Reason.RATE_DIFFERS)
        for number in range(min(len(observed.optimizers), len(replayed.optimizers)))
        for n, (of_ranks, of_one) in enumerate(replay.steps(number), start=1)
    ]  # fmt: skip
    if observed.rates_after_epochs and replayed.rates_after_epochs:
        rates = observed.rates_after_epochs[0], replayed.rates_after_epochs[0]
        when = part(Phrase.AFTER_EPOCH, epoch=1)
        compared.append((*rates, when, Reason.RATE_AFTER_EPOCH_DIFFERS))
    for of_ranks, of_one, when, reason in compared:
        if far(of_ranks, of_one):
            facts = {"of_ranks": of_ranks[0], "of_one": of_one[0], "when": when}
            return [warning("schedule", reason, world_size=len(replay.ranks), **facts)]
    return [right("schedule", Reason.RATES_OF_ONE_RANK)]


def printed_rows(replay: Replay) -> list[ReportRow]:
    """Losses and accuracies that the script prints in the first epoch."""
    check, compared = "printed numbers", 0
    differing: dict[str, dict[str, Any]] = {}  # the first difference of each place
    lines_of_one = printed_lines(replay.replayed)
    for at, lines in printed_lines(replay.observed).items():
        for line, line_of_one in zip(lines, lines_of_one.get(at, []), strict=False):
            statistics = zip(STATISTIC.findall(line), STATISTIC.findall(line_of_one), strict=False)
            for (name, of_ranks), (_, of_one) in statistics:
                compared += 1
                last_digit = 10 ** -len(of_ranks.partition(".")[2].split("e")[0])
                limit = max(2 * last_digit, 1e-3 * abs(float(of_one)))
                if abs(float(of_ranks) - float(of_one)) > limit:
                    facts = {"name": name, "of_ranks": of_ranks, "of_one": of_one, "at": at}
                    number = part(Phrase.PRINTED, world_size=len(replay.ranks), **facts)
                    differing.setdefault(at, number)
    if differing:
        return [warning(check, Reason.NUMBERS_DIFFER, numbers=[*differing.values()])]
    return [right(check, Reason.NUMBERS_OF_ONE_RANK, numbers=compared)] if compared else []


def printed_lines(rank: RankRecord) -> dict[str, list[str]]:
    """What each line of the script printed in the first epoch, after a step."""
    lines: dict[str, list[str]] = {}
    for line in rank.printed:
        if line.steps_before and line.in_first_epoch:
            lines.setdefault(line.at, []).append(line.text)
    return lines


def smallest_batchnorm(rank: RankRecord) -> int:
    """How many values per channel the smallest local BatchNorm normalizes; 0: there is none."""
    return min(rank.batchnorm.values(), default=0)


def batchnorm_rows(replay: Replay, whole_batch_replay: Replay | None) -> list[ReportRow]:
    """Layers that normalize each local batch, and what a batch of all ranks would change."""
    values = smallest_batchnorm(replay.observed)
    if not values:
        return []
    layers = next(iter(replay.observed.batchnorm))
    if whole_batch_replay is None or not whole_batch_replay.stepped:
        return [right("batchnorm", Reason.BATCHNORM_OF_EACH_RANK, layers=layers, values=values)]
    gradients = whole_batch_replay.gradients(0)
    apart = sum(float((pair.of_ranks - pair.of_one).norm()) ** 2 for pair in gradients) ** 0.5
    length = sum(float(pair.of_one.norm()) ** 2 for pair in gradients) ** 0.5 or 1.0
    facts = {"layers": layers, "values": values, "apart": apart / length}
    return [warning("batchnorm", Reason.BATCHNORM_OF_FEW, **facts)]


def not_replayed(replay: Replay, check: str) -> ReportRow:
    if replay.replayed.error:
        error = replay.replayed.error
        facts = {"kind": error.kind, "message": error.message[:120], "at": error.at}
        return not_seen(check, Reason.ONE_RANK_FAILS, **facts)
    if replay.error:
        return not_seen(check, Reason.ONE_RANK_ENDED, message=replay.error)
    return not_seen(check, Reason.ONE_RANK_MADE_NO_STEP)
