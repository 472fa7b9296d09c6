"""Do all ranks have equally many batches in an epoch, and batches of one size?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import LOADING, NO_SET_EPOCH, SAMPLER, iterable, plain
from prove.judge.loader_passes import epochs_of_data_set, place_of
from prove.judge.reasons import Heading, Reason
from prove.judge.table import (
    WARNING,
    WORST_FIRST,
    WRONG,
    ReportRow,
    not_seen,
    right,
    warning,
    wrong,
)
from prove.rank_record import Flag, LoaderPass, RankRecord

NAME = "batches per epoch"


class Sentence(Reason):
    NO_END_OF_DATA = (
        "no rank reached the end of its data ({at})",
        "raise --batches, or prove it with less data; an endless stream has nothing to compare",
    )
    UNEQUAL_BUT_JOINED = "{batches!s}, and Join lets the shorter ones wait"
    UNEQUAL_BUT_STOPPED = "{batches!s}, and all ranks stop with the one that has fewest"
    UNEQUAL_BUT_CUT = (
        "{batches!s}, but the script ends its epochs earlier ({at})",
        "harmless if all ranks end them after the same batch",
    )
    UNEQUAL_BATCHES = (
        "{batches!s} batches on the ranks: whoever has more waits for ever ({at})",
        "DistributedSampler makes them equal; or drop_last; or Join",
        Heading.UNEVEN,
    )
    UNEQUAL_BATCH_SIZES = (
        "{batches} on each rank, but local batches of {sizes!s} samples weigh the same ({at})",
        "equal local batches, or a mean over the global batch",
        Heading.LOSS,
    )
    EQUAL_BATCHES = "{batches} on each rank"


def judge(context: CheckContext) -> list[ReportRow]:
    if not context.epochs:
        return []
    rows = [
        row_of_lengths(context.records, passes, number)
        for number, passes in enumerate(epochs_of_data_set(context.records), start=1)
        if number == 1 or all(each.batches_listed is not None for each in passes)
    ]
    return [min(rows, key=lambda row: WORST_FIRST.index(row.verdict))]


def row_of_lengths(records: list[RankRecord], passes: list[LoaderPass], number: int) -> ReportRow:
    """Judge one pass of all ranks; `number` counts the passes over its data set."""
    at = place_of(passes[0], number)
    listed = [
        loader_pass.batches_listed
        for loader_pass in passes
        if loader_pass.batches_listed is not None
    ]
    given = [loader_pass.batches_given for loader_pass in passes]
    batches = listed if len(listed) == len(passes) else given
    if batches is not listed and not any(loader_pass.ended for loader_pass in passes):
        return not_seen(NAME, Sentence.NO_END_OF_DATA, at=at)
    are_cut = any(
        loader_pass.batches_given < min(n, loader_pass.most_batches)
        for loader_pass, n in zip(passes, batches, strict=True)
    )
    if len({*batches}) > 1:
        if Flag.JOINS in records[0].flags:
            return right(NAME, Sentence.UNEQUAL_BUT_JOINED, batches=batches)
        if Flag.STOP_TOGETHER in records[0].flags:
            return right(NAME, Sentence.UNEQUAL_BUT_STOPPED, batches=batches)
        if are_cut:
            return not_seen(NAME, Sentence.UNEQUAL_BUT_CUT, batches=batches, at=at)
        return wrong(NAME, Sentence.UNEQUAL_BATCHES, batches=batches, at=at)
    n = batches[0]
    for sizes in zip(*(sizes_of(own, are_cut) for own in passes), strict=False):
        if len({*sizes}) > 1:
            return warning(NAME, Sentence.UNEQUAL_BATCH_SIZES, batches=n, sizes=[*sizes], at=at)
    return right(NAME, Sentence.EQUAL_BATCHES, batches=n)


def sizes_of(loader_pass: LoaderPass, is_cut: bool) -> list[int]:
    """List the sizes of all batches of the whole pass, also of those that prove cut off."""
    if is_cut:
        return loader_pass.sizes[: loader_pass.batches_given]
    listed, samples = loader_pass.sizes, len(loader_pass.indices)
    # Only the first sizes are recorded, so the remaining samples count as one more batch.
    unlisted = (loader_pass.batches_listed or 0) - len(listed)
    return listed if unlisted <= 0 or not samples else [*listed, samples - sum(listed)]


PLANTED = (
    plain(
        "unequal numbers of batches", WRONG, NAME,
        (SAMPLER, "sampler = range(0, 60) if rank == 0 else range(60, 96)"),
        NO_SET_EPOCH,
    ),
    plain(
        "local batches of unequal size", WARNING, NAME,
        (LOADING, "batch_size=8 if rank == 0 else 4, sampler=sampler)"),
        (SAMPLER, "sampler = range(0, 64) if rank == 0 else range(64, 96)"),
        NO_SET_EPOCH,
    ),
    iterable(
        "an IterableDataset ends earlier on one rank", WRONG, NAME,
        ("islice(points, part, None,", "islice(points, part, SAMPLES - 60 * self.rank,"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ALL_RECORDS, planted=PLANTED)
