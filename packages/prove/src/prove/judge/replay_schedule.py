"""Are the learning rates those of one rank, and does the schedule fit the length of the run?"""

import math
from typing import NamedTuple

from prove.judge.distances import numbers_differ
from prove.judge.reasons import Phrase
from prove.judge.replay import Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import ReplayCheck, ReportRow, right, warning
from prove.judge.wording import phrase
from prove.rank_record import Ended, Flag, LoaderPass, Mode, RankRecord, ScheduleRecord

CHECK = ReplayCheck.SCHEDULE
FEW_STEPS = 2  # spare steps that a script may add to a schedule
LENGTH_TOLERANCE = 0.05  # allows for rounded lengths, or a few steps of warm-up


class Schedule(NamedTuple):
    """A schedule that is stepped by batch, beside the batches per epoch of its rank."""

    record: ScheduleRecord
    batches: float  # length of the schedule
    batches_per_epoch: int

    @property
    def epochs(self) -> float:
        return self.batches / self.batches_per_epoch


def schedule_rows(replay: Replay) -> list[ReportRow]:
    return rows_of_end(replay) or rows_of_rates(replay)


def rows_of_end(replay: Replay) -> list[ReportRow]:
    """Report that one rank ends by itself before it has had all batches of the ranks."""
    ranks_batches = min(map(training_batches, replay.records))
    one_batches = training_batches(replay.one_rank_record)
    ends = replay.one_rank_record.ended == Ended.FINISHED and replay.name == Mode.REPLAY
    ends &= replay.one_rank_record.step_count < min(own.step_count for own in replay.records)
    joins = any(Flag.JOINS in own.flags for own in replay.records)
    if not ends or joins or one_batches >= ranks_batches:
        return []
    facts = {"of_ranks": ranks_batches, "of_one": one_batches, "world_size": len(replay.records)}
    return [warning(CHECK, ReplayReason.ENDS_EARLIER, **facts)]


def training_batches(rank: RankRecord) -> int:
    return sum(each.batches_given for each in rank.loader_passes if each.with_gradients)


def rows_of_rates(replay: Replay) -> list[ReportRow]:
    if rows := rows_of_one_cycle(replay.rank_0_record):
        return rows
    by_batch = schedules_by_batch(replay)
    if not by_batch:
        return compare_rates(replay)
    rows = [row for pair in by_batch if (row := row_of_length(*pair, len(replay.records)))]
    return rows[:1] or compare_rates(replay)


def rows_of_one_cycle(rank: RankRecord) -> list[ReportRow]:
    """Report a OneCycleLR that will raise an error in the middle of an epoch.

    Its total_steps do not fit the number of batches of the loader.
    """
    first = first_trained_pass(rank)
    if follows_the_cut_loader(rank) or first is None or not first.length:
        return []
    left = max(0, first.length - first.batches_given)  # batches of the epoch after prove's cut
    if left and first.batches_given < first.most_batches:  # the script itself cut the epoch
        return []
    for record in rank.schedules:
        if not record.total_steps or not record.by_batch or not record.batches:
            continue
        steps = first.step_count + left // (first.batches_per_step or 1)
        steps = round(steps * record.step_count / record.batches)
        if record.total_steps % steps <= FEW_STEPS:
            continue
        epochs = record.total_steps / steps
        facts = {
            "total": record.total_steps, "steps": steps, "epochs": epochs, "at": record.source_line,
            "more": record.total_steps + 1, "run": math.ceil(epochs),
        }  # fmt: skip
        return [warning(CHECK, ReplayReason.ONE_CYCLE_ENDS_EARLY, **facts)]
    return []


def follows_the_cut_loader(rank: RankRecord) -> bool:
    """May the script have made its schedule as long as a loader that prove has cut?"""
    return Flag.ASKED_FOR_LENGTH in rank.flags


def first_trained_pass(rank: RankRecord) -> LoaderPass | None:
    return next(iter(rank.trained_passes), None)


def schedules_by_batch(replay: Replay) -> list[tuple[Schedule, Schedule]]:
    """Pair the schedules of a rank with those of the one rank, whose epochs have other lengths."""
    ranks, one = replay.rank_0_record, replay.one_rank_record
    first = first_trained_pass(ranks)
    if follows_the_cut_loader(ranks) or first is None:
        return []
    window = first.batches_per_step or 1
    measured = [
        (measured_schedule(ranks_record, ranks, window), measured_schedule(one_record, one, window))
        for ranks_record, one_record in zip(ranks.schedules, one.schedules, strict=False)
    ]
    return [(of_ranks, of_one) for of_ranks, of_one in measured if of_ranks and of_one]


def measured_schedule(record: ScheduleRecord, rank: RankRecord, window: int) -> Schedule | None:
    """Measure a schedule in batches, `window` of which make one step; None if unknown."""
    first = first_trained_pass(rank)
    epoch = first.batches_and_samples if first else None
    if not record.by_batch or not record.length or not record.batches or epoch is None:
        return None
    steps_per_batch = record.step_count / record.batches / window
    return Schedule(record, record.length / steps_per_batch, epoch[0])


def is_whole(epochs: float) -> bool:
    """Is this a whole number of epochs? If so, the length was chosen for these ranks."""
    return abs(epochs - round(epochs)) < 0.01


def row_of_length(
    ranks_schedule: Schedule, one_schedule: Schedule, world_size: int
) -> ReportRow | None:
    """Judge the lengths of two schedules; return None if they tell nothing."""
    epochs = one_schedule.batches_per_epoch / ranks_schedule.batches_per_epoch
    lengths = one_schedule.batches / ranks_schedule.batches
    is_warm_up = ranks_schedule.batches <= ranks_schedule.batches_per_epoch
    if is_warm_up or abs(epochs - 1) < LENGTH_TOLERANCE:
        return None
    facts = {
        "batches": round(ranks_schedule.batches), "batches_of_one": round(one_schedule.batches),
        "epoch": ranks_schedule.batches_per_epoch, "epoch_of_one": one_schedule.batches_per_epoch,
        "epochs": ranks_schedule.epochs, "epochs_of_one": one_schedule.epochs,
        "world_size": world_size, "at": ranks_schedule.record.source_line,
    }  # fmt: skip
    if abs(lengths / epochs - 1) < LENGTH_TOLERANCE:
        rates = ranks_schedule.record.highest_rate, one_schedule.record.highest_rate
        if numbers_differ([rates[0]], [rates[1]], 1e-3):
            rates_as_facts = {"of_ranks": rates[0], "of_one": rates[1]}
            return warning(CHECK, ReplayReason.HIGHEST_RATE_DIFFERS, **rates_as_facts, **facts)
        return right(CHECK, ReplayReason.SCHEDULE_FOLLOWS_LOADER, **facts)
    if abs(lengths - 1) < LENGTH_TOLERANCE and not (
        is_whole(ranks_schedule.epochs) > is_whole(one_schedule.epochs)
    ):
        return warning(CHECK, ReplayReason.SCHEDULE_IGNORES_LOADER, **facts)
    return None


def compare_rates(replay: Replay) -> list[ReportRow]:
    """Compare the learning rates and momenta of all ranks and of one rank, step by step.

    A step that the script makes by hand has none.
    """
    rank_0_record, one_rank_record = replay.rank_0_record, replay.one_rank_record
    steps = [
        (*pair, phrase(Phrase.AT_STEP, step=n, at=pair[0].source_line))
        for optimizer_index in range(
            min(len(rank_0_record.optimizers), len(one_rank_record.optimizers))
        )
        for n, pair in enumerate(replay.steps(optimizer_index), start=1)
    ]
    compared = [  # rates, when, and the reason if they differ
        (ranks_step.learning_rates, one_step.learning_rates, when, ReplayReason.RATE_DIFFERS)
        for ranks_step, one_step, when in steps
    ]
    if rank_0_record.rates_after_epochs and one_rank_record.rates_after_epochs:
        rates = rank_0_record.rates_after_epochs[0], one_rank_record.rates_after_epochs[0]
        when = phrase(Phrase.AFTER_EPOCH, epoch=1)
        compared.append((*rates, when, ReplayReason.RATE_AFTER_EPOCH_DIFFERS))
    compared += [  # one rank was given the momenta of the ranks, too
        (ranks_step.momenta, one_step.momenta, when, ReplayReason.MOMENTUM_DIFFERS)
        for ranks_step, one_step, when in steps
    ]
    for ranks_values, one_values, when, reason in compared:
        if numbers_differ(ranks_values, one_values):
            pairs = zip(ranks_values, one_values, strict=False)
            own, one = next((own, one) for own, one in pairs if numbers_differ([own], [one]))
            facts = {"of_ranks": own, "of_one": one, "when": when}
            return [warning(CHECK, reason, world_size=len(replay.records), **facts)]
    has_rates = any(ranks_values and one_values for ranks_values, one_values, *_ in compared)
    return [right(CHECK, ReplayReason.RATES_OF_ONE_RANK)] if has_rates else []
