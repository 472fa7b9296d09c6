"""Do the epochs of all ranks have the length, the order and the random numbers of one process?"""

from prove import random_state
from prove.judge.reasons import Phrase
from prove.judge.run_reasons import RunReason
from prove.judge.samples import (
    rows_are_split,
    same_dataset,
    same_on_all_ranks,
    share_one_data_set,
    trained_loader_passes,
)
from prove.judge.table import (
    NOT_SEEN,
    RIGHT,
    WARNING,
    WRONG,
    Check,
    ReportRow,
    not_seen,
    right,
    warning,
    wrong,
)
from prove.judge.wording import phrase
from prove.rank_record import LoaderPass, Note, RankRecord, RunOutcome

WORST_FIRST = (WRONG, WARNING, NOT_SEEN, RIGHT)


def batches_up_to_last_window(record: RankRecord) -> int:
    """Where several batches make one step, and the epoch was cut so that its last window is longer
    or shorter than it is: how many batches end as the whole epoch does? 0: these do."""
    for loader_pass in record.loader_passes:
        given, length, window = loader_pass.batches_given, loader_pass.length, loader_pass.window
        is_cut = loader_pass.limit <= given < length and not loader_pass.ended
        if not is_cut or not loader_pass.backwards or window == 1:
            continue
        if window in (0, given):  # the cut may be what made it step: the window may be longer
            window = given
        elif loader_pass.ends_as_whole():
            continue
        return min(length, 2 * window + (length - 2 * window) % window)
    return 0


def shortest_of_unequal_epochs(records: list[RankRecord]) -> int:
    """Batches of the rank that has fewest, in the epochs that are unequal; 0: all have as many, or
    nobody knows."""
    if not records:
        return 0
    if Note.JOINS in records[0].notes:
        return 0
    batches = [[each.batches or 0 for each in passes] for passes in epochs_of_data_set(records)]
    return max((min(of_ranks) for of_ranks in batches if len({*of_ranks}) > 1), default=0)


def epochs_of_data_set(records: list[RankRecord]) -> list[list[LoaderPass]]:
    """The passes over the data set that is trained on first."""
    passes = trained_loader_passes(records)
    datasets = [each.dataset for each in passes[0]] if passes else []
    return [each for each in passes if [own.dataset for own in each] == datasets]


def stop_together(outcome: RunOutcome) -> bool:
    """Do all ranks end well, and make as many steps in each epoch?

    A rank that waits in a step when it is ended has not counted it.
    """
    records = outcome.records
    if outcome.status or not all(rank.ended.is_well for rank in records):
        return False
    steps = [{*map(steps_of_epoch, records, passes)} for passes in epochs_of_data_set(records)]
    return bool(steps) and all(len(of_ranks) == 1 for of_ranks in steps)


def steps_of_epoch(record: RankRecord, loader_pass: LoaderPass) -> int:
    """Until the next epoch begins; the last step before a `break` is one of them."""
    later = record.loader_passes[loader_pass.number + 1 :]
    ends = [each.steps_before for each in later if each.dataset == loader_pass.dataset]
    return (ends[0] if ends else record.steps) - loader_pass.steps_before


def epoch_rows(records: list[RankRecord]) -> list[ReportRow]:
    epochs = trained_loader_passes(records) if share_one_data_set(records) else []
    if not epochs:
        return []
    lengths = [
        length_row(records, passes, number)
        for number, passes in enumerate(epochs_of_data_set(records), start=1)
        if number == 1 or all(each.batches is not None for each in passes)
    ]
    worst = min(lengths, key=lambda row: WORST_FIRST.index(row.verdict))
    rows = [worst, *order_rows(epochs), *dropout_rows(records)]
    return rows + augmentation_rows(epochs[0])


def length_row(records: list[RankRecord], passes: list[LoaderPass], number: int) -> ReportRow:
    """number: of these passes, among those over their data set."""
    check, first = Check.BATCHES_PER_EPOCH, passes[0]
    at = first.at if number == 1 else phrase(Phrase.IN_PASS, at=first.at, number=number)
    listed = [loader_pass.batches for loader_pass in passes if loader_pass.batches is not None]
    given = [loader_pass.batches_given for loader_pass in passes]
    batches = listed if len(listed) == len(passes) else given
    if batches is not listed and not any(loader_pass.ended for loader_pass in passes):
        return not_seen(check, RunReason.NO_END_OF_DATA, at=at)
    are_cut = any(
        loader_pass.batches_given < min(n, loader_pass.limit)
        for loader_pass, n in zip(passes, batches, strict=True)
    )
    if len({*batches}) > 1:
        if Note.JOINS in records[0].notes:
            return right(check, RunReason.UNEQUAL_BUT_JOINED, batches=batches)
        if Note.STOP_TOGETHER in records[0].notes:
            return right(check, RunReason.UNEQUAL_BUT_STOPPED, batches=batches)
        if are_cut:
            return not_seen(check, RunReason.UNEQUAL_BUT_CUT, batches=batches, at=at)
        return wrong(check, RunReason.UNEQUAL_BATCHES, batches=batches, at=at)
    n = batches[0]
    for sizes in zip(*(sizes_of(own, are_cut) for own in passes), strict=False):
        if len({*sizes}) > 1:
            reason = RunReason.UNEQUAL_BATCH_SIZES
            return warning(check, reason, batches=n, sizes=[*sizes], at=at)
    return right(check, RunReason.EQUAL_BATCHES, batches=n)


def sizes_of(loader_pass: LoaderPass, is_cut: bool) -> list[int]:
    """Of the batches that the script takes, also of those that we did not give it."""
    if is_cut:
        return loader_pass.sizes[: loader_pass.batches_given]
    listed, samples = loader_pass.sizes, len(loader_pass.indices)
    unlisted = (loader_pass.batches or 0) - len(listed)  # only the first ones are written down
    return listed if unlisted <= 0 or not samples else [*listed, samples - sum(listed)]


def order_rows(passes: list[list[LoaderPass]]) -> list[ReportRow]:
    check, first = Check.ORDER, passes[0]
    later = [of_ranks for of_ranks in passes[1:] if of_ranks[0].dataset == first[0].dataset]
    if not later:
        return [not_seen(check, RunReason.NO_SECOND_EPOCH, at=first[0].at)]
    epochs = list(zip(first, later[0], strict=True))  # the first two, of each rank
    by_index = all(loader_pass.samples_file for loader_pass in (*first, *later[0]))
    if by_index and any(one.indices != two.indices for one, two in epochs):
        return [right(check, RunReason.ORDER_CHANGES)]
    loader_pass = first[0]
    if any(one.checksums != two.checksums for one, two in epochs):
        if not by_index:
            return [right(check, RunReason.ORDER_CHANGES)]
        if not any(loader_pass.drew) and not loader_pass.workers:
            return [right(check, RunReason.DATA_CHANGES)]
    loader = {"at": loader_pass.at, "sampler": loader_pass.sampler}
    asked = loader_pass.sampler == "DistributedSampler" and loader_pass.shuffle
    if asked or loader_pass.sampler == "RandomSampler":
        return [wrong(check, RunReason.EPOCH_NOT_SET, **loader)]
    if loader_pass.shuffle is False or (
        by_index and loader_pass.indices == sorted(loader_pass.indices)
    ):
        return [right(check, RunReason.ORDER_FIXED)]
    return [warning(check, RunReason.ORDER_REPEATS, **loader)]


def dropout_rows(records: list[RankRecord]) -> list[ReportRow]:
    for at in sorted(set.intersection(*({*rank.dropout} for rank in records))):
        if len({rank.dropout[at] for rank in records}) > 1:
            return [right(Check.DROPOUT, RunReason.MASKS_DIFFER)]
        return [warning(Check.DROPOUT, RunReason.MASKS_ALIKE, at=at)]
    return []


def augmentation_rows(passes: list[LoaderPass]) -> list[ReportRow]:
    """Random numbers that a rank draws while it loads, in this process or in its workers."""
    check, first = Check.AUGMENTATION, passes[0]
    drew = [
        number
        for number in range(len(random_state.GENERATORS))
        if all(loader_pass.drew[number] for loader_pass in passes)
    ]
    same = [
        random_state.GENERATORS[number]
        for number in drew
        if len({loader_pass.generators[number] for loader_pass in passes}) == 1
    ]
    seeds_workers = first.workers and first.base_seed is not None
    if seeds_workers and same_on_all_ranks(passes, "base_seed"):
        drew_nothing = not any(loader_pass.workers_drew for loader_pass in passes)
        if first.is_stream or drew_nothing or not same_dataset(passes):
            return []
        return [warning(check, RunReason.WORKER_SEEDS_ALIKE, at=first.at)]
    if same:
        return [warning(check, RunReason.DRAWS_ALIKE, generators=same, at=first.at)]
    if drew:
        return [right(check, RunReason.DRAWS_DIFFER)]
    if seeds_workers:
        return [right(check, RunReason.WORKER_SEEDS_DIFFER)]
    return []


def original_epoch_rows(records: list[RankRecord], original: RankRecord) -> list[ReportRow]:
    """Do all ranks together train on as many samples, in as many batches, as the original would?
    It got our batches, but its loader has a length of its own."""
    check, passes = Check.EPOCH_OF_ORIGINAL, trained_loader_passes(records)
    passes_of_original = [each for each in original.loader_passes if each.steps]
    if not passes or not passes_of_original:
        return []
    compared = (passes_of_original[0], *passes[0])
    unknown = [each.at for each in compared if each.batches_and_samples is None]
    if unknown:
        return [not_seen(check, RunReason.ORIGINAL_WITHOUT_LENGTH, at=unknown[0])]
    known = [epoch for each in compared if (epoch := each.batches_and_samples)]
    (batches_of_original, samples_of_original), (batches, samples), *others = known
    if not rows_are_split(records):
        samples += sum(of_rank for _, of_rank in others)
    lengths = {
        "samples": samples, "batches": batches, "world_size": len(records),
        "samples_of_original": samples_of_original, "batches_of_original": batches_of_original,
        "at": passes[0][0].at,
    }  # fmt: skip
    if samples < samples_of_original:
        return [warning(check, RunReason.ORIGINAL_HAS_MORE_SAMPLES, **lengths)]
    accumulates = any(
        loader_pass.steps < loader_pass.batches_given
        for loader_pass in (passes[0][0], passes_of_original[0])
    )
    if batches != batches_of_original and not accumulates:
        return [warning(check, RunReason.ORIGINAL_HAS_OTHER_BATCHES, **lengths)]
    return [right(check, RunReason.ORIGINAL_HAS_THE_SAME_EPOCH, **lengths)]
