"""Judge a replay beyond its gradients: can it be compared, and what do the ranks draw?"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

from prove.judge.distances import distance, numbers_differ, relative_error_of_projections
from prove.judge.rank_steps import differing_statistic
from prove.judge.reasons import Phrase, Reason
from prove.judge.replay import Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import WRONG, ReplayCheck, ReportRow, not_seen, right, warning
from prove.judge.wording import phrase
from prove.rank_record import DataFinding, DrawFinding, Flag, RaisedError, RankRecord

DRAWS_OF_SHARES = {"numpy.beta", "numpy.dirichlet", "_sample_dirichlet"}  # never decide a branch
FLOAT64 = ("torch.float64", "torch.complex128")
OTHER_DTYPE = r"dtype|scalar ?type|\b(double|float|half|bfloat16)\b.* type"
OTHER_SHAPE = r"size|shape|mat1|dimension|expected|out of bounds"
OTHER_RANKS = r"world.?size|number of ranks|process.?group|gloo|nccl"
SMALL_BATCH = 16  # with fewer values per channel, BatchNorm's statistics are noisy


class Reproduction(NamedTuple):
    """How well the ranks reproduced their gradients when they ran again on their own records."""

    relative_error: float  # the largest relative error of a gradient
    rank: int
    step: int


def reproduction(
    observed_records: list[RankRecord], control: list[RankRecord]
) -> Reproduction | None:
    """Measure how well the control reproduces the observed run; None if it made no step."""
    largest = Reproduction(0.0, 0, 1)
    if len(control) != len(observed_records):
        return None
    for own, again in zip(observed_records, control, strict=True):
        if not again.step_count or again.error:
            return None
        for optimizer, other in zip(own.optimizers, again.optimizers, strict=False):
            pairs = list(zip(optimizer.steps, other.steps, strict=False))
            for n, (step, step_again) in enumerate(pairs, start=1):
                new = relative_error_of_projections(step.gradients, step_again.gradients)
                if not any(step.gradients):
                    change = distance(step.weights_after, step.weights_before) or 1.0
                    new = distance(step.weights_after, step_again.weights_after) / change
                if new > largest.relative_error:
                    largest = Reproduction(new, own.rank, n)
    return largest


def is_sum_over_local_batch(replay: Replay, sequence: Replay) -> bool:
    """Did rank 0 compute from its own batch what one rank computes from it?

    If so, the loss is a sum over the local batch, whatever the number of ranks. With a batch size
    per rank, this may be meant so.
    """
    sizes = [loader_pass.batch_size for loader_pass in replay.rank_0_record.trained_passes]
    if not sequence.stepped or not sizes or sequence.one_rank_record.own_batch_size != sizes[0]:
        return False
    steps = sequence.steps(0)
    if not steps:
        return False
    pairs = zip(*(step.local_gradients for step in steps[0]), strict=False)
    known = [pair for pair in pairs if None not in pair]
    of_rank_0, of_one_rank = ([pair[run] for pair in known] for run in (0, 1))
    return bool(known) and not numbers_differ(of_rank_0, of_one_rank, limit=1e-3)


def unsure_draws(replay: Replay) -> ReportRow | None:
    """Say which draws could not be passed to one rank, so that a difference means nothing."""
    reasons = {
        DrawFinding.OPAQUE: ReplayReason.DRAWS_IN_KERNEL,
        DrawFinding.TOO_MANY: ReplayReason.TOO_MANY_DRAWS,
        DrawFinding.ESCAPED: ReplayReason.DRAWS_ESCAPED,
        DrawFinding.NOT_MATCHED: ReplayReason.DRAWS_NOT_MATCHED,
    }
    for finding, reason in reasons.items():
        if places := replay.source_lines_of_draws(finding):
            return not_seen(replay.check, reason, places=places)
    return None


def data_not_given(replay: Replay, rows: list[ReportRow]) -> ReportRow | None:
    """Say which data of a loop without a DataLoader could not be passed to one rank.

    Then neither a difference nor an agreement means anything. Returns None if all were passed.
    """
    first, data = replay.one_rank_record, replay.one_rank_record.data
    different = [row for row in rows if row.verdict == WRONG]
    of_all = {
        DataFinding.TOO_MANY: [
            at for _, at in replay.rank_0_record.data.get(DataFinding.TOO_MANY, [])
        ]
    }
    if not different:
        changed = places_until(first, DataFinding.CHANGED, None)
        late = places_until(first, DataFinding.LATE, None)
        late = late or places_until(first, DataFinding.LOCAL_NUMBER, None)
        if changed and late:
            return not_seen(replay.check, ReplayReason.LOSS_KNOWS_RANKS, late=late, changed=changed)
        if other := places_until(first, DataFinding.OTHER, None):
            return not_seen(replay.check, ReplayReason.OTHER_DATA, places=other)
        if statistic := differing_statistic(replay.records):
            return not_seen(replay.check, ReplayReason.EQUAL_BUT_STATISTICS, **statistic)
        return None
    # The steps of all optimizers are counted together.
    step = max(int(each.facts.get("step", 1)) for each in different)
    step *= sum(bool(optimizer.steps) for optimizer in first.optimizers)
    reasons = {
        DataFinding.TOO_MANY: ReplayReason.TOO_MUCH_DATA,
        DataFinding.NOT_GIVEN: ReplayReason.DATA_NOT_MERGED,
        DataFinding.LATE: ReplayReason.DATA_COME_LATE,
        DataFinding.LATE_INPUT: ReplayReason.DATA_COME_LATE,
        DataFinding.LOCAL_NUMBER: ReplayReason.LOCAL_NUMBER,
    }
    for finding, reason in reasons.items():
        if (
            finding == DataFinding.LATE_INPUT
            and Flag.MODEL_RETURNS_LOSS in replay.rank_0_record.flags
        ):
            continue  # such a model computes the loss from its inputs
        places = of_all.get(finding) or places_until(first, finding, step)
        if places:
            apart = different[0].facts.get("apart", 0.0)
            return not_seen(replay.check, reason, places=places, apart=apart)
    given = (DataFinding.GIVEN, DataFinding.LATE_INPUT, DataFinding.STATISTIC)
    if not any(data.get(finding) for finding in given):
        return not_seen(replay.check, ReplayReason.NO_LOADER)
    return None


def places_until(record: RankRecord, finding: DataFinding, step: int | None) -> list[str]:
    noted = record.data.get(finding, [])
    return list(dict.fromkeys(at for n, at in noted if step is None or n <= step))


def by_statistics(replay: Replay, row: ReportRow) -> ReportRow:
    """Explain a difference by a mean over each rank's samples, if its data contain one."""
    tags = places_until(
        replay.one_rank_record, DataFinding.STATISTIC, int(row.facts.get("step", 1))
    )
    statistics = [each for each in replay.rank_0_record.statistics if each.tag in tags]
    if row.verdict != WRONG or not statistics:
        return row
    first, ranks_statistics = statistics[0], [record.statistics for record in replay.records]
    values = [each.value for own in ranks_statistics for each in own if each.tag == first.tag]
    facts = {**row.facts, "name": first.name, "at": first.source_line, "values": values}
    return replace(row, reason=ReplayReason.STATISTICS_BY_RANK, facts=facts)


def missing_before_a_later_epoch(replay: Replay) -> dict[str, Any] | None:
    """Say what the ranks did between two epochs that one rank may have done differently."""
    if places := replay.source_lines_of_draws(DrawFinding.BETWEEN):
        return phrase(Phrase.DRAWN_BETWEEN, places=places)
    trained = {each.dataset_number for each in replay.rank_0_record.trained_passes}
    for each in replay.rank_0_record.loader_passes:
        is_cut = not each.with_gradients and not each.ended and each.batches_given
        if is_cut and each.dataset_number in trained:
            return phrase(Phrase.READ_BETWEEN, at=each.source_line)
    return None


def draws_not_given(replay: Replay, rows: list[ReportRow]) -> ReportRow | None:
    """Without a loader, say that the original gets no draws: nobody knows when they are due."""
    of_draws = (ReplayCheck.RANDOM_DECISIONS, ReplayCheck.RANDOM_NUMBERS)
    places = [at for row in rows if row.check in of_draws for at in row.facts["places"]]
    if not places or replay.rank_0_record.trained_passes:
        return None
    return not_seen(replay.check, ReplayReason.DRAWS_NOT_GIVEN, places=places)


def draw_rows(replay: Replay) -> list[ReportRow]:
    """Judge the random numbers that the ranks draw inside a step."""
    rows = decision_rows(replay)
    same = replay.source_lines_of_draws(DrawFinding.SAME_NOISE)
    of_dropout = replay.rank_0_record.dropout  # dropout has its own row
    by_sample = [at for at in replay.source_lines_of_draws(DrawFinding.BY_SAMPLE) if at not in same]
    if places := [at for at in same if at not in of_dropout]:
        rows.append(warning(ReplayCheck.RANDOM_NUMBERS, ReplayReason.SAME_NOISE, places=places))
    elif places := by_sample:
        rows.append(right(ReplayCheck.RANDOM_NUMBERS, ReplayReason.NOISE_BY_SAMPLE, places=places))
    return rows


def decision_rows(replay: Replay) -> list[ReportRow]:
    """Judge draws that each rank makes once for its whole batch.

    They may be a share, such as mixup's, or decide a branch; only the distribution's name can tell.
    """
    check, places = ReplayCheck.RANDOM_DECISIONS, replay.source_lines_of_draws(DrawFinding.DECISION)
    names: dict[str, set[str]] = {}
    for key in replay.batch_decisions:
        names.setdefault(key.source_line, set()).add(key.name)
    shares = [at for at in places if names.get(at) and names[at] <= DRAWS_OF_SHARES]
    agreed_first = replay.source_lines_of_draws(DrawFinding.COMMON)
    agreed = [at for at in places if at not in shares and at in agreed_first]
    decided = [at for at in places if at not in shares and at not in agreed_first]
    rows = []
    if agreed:
        rows.append(warning(check, ReplayReason.COIN_LEAVES_STEP, places=agreed))
    if decided:
        rows.append(warning(check, ReplayReason.COIN_BY_RANK, places=decided))
    if shares and not rows:
        rows.append(right(check, ReplayReason.SHARE_BY_RANK, places=shares))
    return rows


def batchnorm_rows(replay: Replay, whole_batch_replay: Replay | None) -> list[ReportRow]:
    """Report BatchNorm over local batches, and how much the whole batch would change."""
    values = smallest_batchnorm(replay.rank_0_record)
    if not values:
        return []
    facts = {"layers": next(iter(replay.rank_0_record.batchnorm)), "values": values}
    if whole_batch_replay is None or not whole_batch_replay.stepped:
        return [right(ReplayCheck.BATCHNORM, ReplayReason.BATCHNORM_OF_EACH_RANK, **facts)]
    gradients = whole_batch_replay.gradients(0)
    apart = (
        sum(float((pair.ranks_gradient - pair.one_gradient).norm()) ** 2 for pair in gradients)
        ** 0.5
    )
    length = sum(float(pair.one_gradient.norm()) ** 2 for pair in gradients) ** 0.5 or 1.0
    return [
        warning(ReplayCheck.BATCHNORM, ReplayReason.BATCHNORM_OF_FEW, apart=apart / length, **facts)
    ]


def smallest_batchnorm(record: RankRecord) -> int:
    """Return the fewest values per channel that a local BatchNorm normalizes; 0 without one."""
    return min(record.batchnorm.values(), default=0)


def reason_of_failure(error: RaisedError, in_float64: bool) -> Reason:
    """Choose the advice by the words of an error: torch and numpy have no types for these."""
    text = error.message.lower()
    if error.class_name in ("RuntimeError", "TypeError") and re.search(OTHER_DTYPE, text):
        return ReplayReason.REPLAY_FAILS_BY_DTYPE if in_float64 else ReplayReason.REPLAY_FAILS
    of_tensors = error.class_name in ("RuntimeError", "ValueError", "IndexError")
    if of_tensors and re.search(OTHER_SHAPE, text) and not re.search(OTHER_RANKS, text):
        return ReplayReason.REPLAY_FAILS_BY_SHAPE
    return ReplayReason.REPLAY_FAILS


def why_not_replayed(replay: Replay) -> ReportRow | None:
    """Say why a replay failed; return None if it did not. A failure is no verdict."""
    error, record = replay.one_rank_record.error, replay.one_rank_record
    if error is not None:
        if error.class_name == "CannotMergeError":
            return not_seen(
                replay.check, ReplayReason.CANNOT_MERGE, what=error.message, at=error.source_line
            )
        facts = {"kind": error.class_name, "at": error.source_line, "message": error.message[:160]}
        steps = [step for optimizer in replay.rank_0_record.optimizers for step in optimizer.steps]
        in_float64 = any(step.dtype in FLOAT64 for step in steps)
        return not_seen(replay.check, reason_of_failure(error, in_float64), **facts)
    if replay.wrote_record and record.world_size > 1:
        return not_seen(replay.check, ReplayReason.NOT_ONE_RANK, world_size=record.world_size)
    if not replay.stepped:
        reason = ReplayReason.NO_REPLAYED_STEP if not replay.error else ReplayReason.REPLAY_SAYS
        return not_seen(replay.check, reason, message=replay.error)
    return None
