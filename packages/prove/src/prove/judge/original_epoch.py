"""Is an epoch of all ranks as long as one of the original?"""

from prove.judge.loader_passes import rows_are_split, trained_loader_passes
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import ReplayCheck, ReportRow, not_seen, right, warning
from prove.rank_record import RankRecord


def original_epoch_rows(records: list[RankRecord], original: RankRecord) -> list[ReportRow]:
    """Do all ranks together train on as many samples and batches per epoch as the original?

    The replay gave the original the batches of the ranks, but its loader has its own length.
    """
    check, passes = ReplayCheck.EPOCH_OF_ORIGINAL, trained_loader_passes(records)
    passes_of_original = original.trained_passes
    if not passes or not passes_of_original:
        return []
    compared = (passes_of_original[0], *passes[0])
    unknown = [each.source_line for each in compared if each.batches_and_samples is None]
    if unknown:
        return [not_seen(check, ReplayReason.ORIGINAL_WITHOUT_LENGTH, at=unknown[0])]
    known = [epoch for each in compared if (epoch := each.batches_and_samples)]
    (batches_of_original, samples_of_original), (batches, samples), *others = known
    if not rows_are_split(records):
        samples += sum(of_rank for _, of_rank in others)
    lengths = {
        "samples": samples, "batches": batches, "world_size": len(records),
        "samples_of_original": samples_of_original, "batches_of_original": batches_of_original,
        "at": passes[0][0].source_line,
    }  # fmt: skip
    if samples < samples_of_original:
        return [warning(check, ReplayReason.ORIGINAL_HAS_MORE_SAMPLES, **lengths)]
    accumulates = any(
        loader_pass.step_count < loader_pass.batches_given
        for loader_pass in (passes[0][0], passes_of_original[0])
    )
    if batches != batches_of_original and not accumulates:
        return [warning(check, ReplayReason.ORIGINAL_HAS_OTHER_BATCHES, **lengths)]
    return [right(check, ReplayReason.ORIGINAL_HAS_THE_SAME_EPOCH, **lengths)]
