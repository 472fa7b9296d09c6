"""Does the evaluation count each sample once, over all ranks together?"""

from dataclasses import replace
from typing import Any, NamedTuple

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.checks.samples import TOLD_APART
from prove.judge.loader_passes import NEARLY_ALL, same_dataset, sample_count
from prove.judge.reasons import Heading, Reason
from prove.judge.table import RIGHT, WARNING, ReportRow, not_seen, right, warning
from prove.rank_record import EVALUATION_FACTOR, MAX_COLLECTIVES, Flag, LoaderPass, RankRecord
from prove.watch.rank_run import RankRun

NAME = "evaluation"


class Sentence(Reason):
    NO_EVALUATION = (
        "no pass over the loader at {places}: an evaluation counts that comes within the first two "
        "epochs",
        "to see yours, let it come earlier (fewer epochs), or raise --batches",
    )
    EVALUATED_BY_SOME = "by {ranks} of {world_size} ranks ({at})"
    EVALUATED_OWN_DATASETS = (
        "each rank evaluates a data set of its own ({at})",
        "if these are parts of one, all_reduce sums and counts, then divide",
        Heading.ACCURACY,
    )
    EVALUATED_UNKNOWN = ("the samples of {at} cannot be told apart", TOLD_APART)
    EVALUATED_BY_EACH = (
        "each rank evaluates all {size} samples ({at})",
        "each rank a part, then all_reduce; no mistake if the results are not added up",
        Heading.ACCURACY,
    )
    EVALUATED_TWICE = (
        "{twice} of {size} samples are counted twice ({at}, {sampler})",
        "Subset(dataset, range(rank, len(dataset), world_size))",
        Heading.ACCURACY,
    )
    EVALUATED_SHARED = (
        "of {size} samples, {twice} are evaluated by more than one rank, by content ({at})",
        "each sample on one rank: range(rank, n, world_size) of one list that all ranks have; no "
        "mistake if the results are not added up",
        Heading.ACCURACY,
    )
    EVALUATED_APART = "no sample by more than one rank, by content: {size} samples ({at})"
    EVALUATED_NOT_ALL = (
        "{lost} of {size} samples are left out ({at})",
        "no drop_last for evaluation",
        Heading.ACCURACY,
    )
    EVALUATED_NOT_SUMMED = (
        "each rank evaluates a part of the {size} samples, and no collective follows ({at})",
        "all_reduce sums and counts, then divide",
        Heading.ACCURACY,
    )
    EVALUATED_ONCE = "each of {size} samples once ({at})"
    EVALUATED_FIRST_ONES = (
        "each rank stops after {given} of {batches} batches: {samples} of {size} samples ({at}), "
        "the first ones, each once"
    )
    EVALUATED_OTHERS = (
        "each rank stops after {given} of {batches} batches: {samples} of {size} samples ({at}); "
        "on another number of ranks, others",
        "choose this part before it is dealt out, with the same seed on all ranks",
        Heading.ACCURACY,
    )


class UnreadData(NamedTuple):
    """A data set of one rank that has a loader but was never read."""

    source_line: str  # where its loader was made


def watch(run: RankRun) -> None:
    unread = run.record.notes(UnreadData)
    made: list[tuple[Any, str]] = []  # the data set of each loader, and the line of the loader
    read: list[Any] = []

    def note() -> None:
        unread[:] = [
            UnreadData(at) for dataset, at in made if not any(dataset is other for other in read)
        ]

    def note_made(loader: Any, at: str) -> None:
        made.append((loader.dataset, at))
        note()

    def note_read(loader: Any) -> None:
        """Count a data set as read, whichever loader reads it: Accelerate makes another."""
        if not any(loader.dataset is other for other in read):
            read.append(loader.dataset)
            note()

    run.events.loaders_made.append(note_made)
    run.events.loaders_read.append(note_read)


def judge(context: CheckContext) -> list[ReportRow]:
    """Return a row for each reason, with all lines that have it."""
    records = context.records
    if not context.epochs:
        return []
    datasets: dict[tuple, list[LoaderPass]] = {}  # by data set: the first evaluation of each rank
    for rank in records:
        first: dict[tuple, LoaderPass] = {}
        for loader_pass in evaluations(rank):
            first.setdefault(dataset_of(loader_pass), loader_pass)
        for key, loader_pass in first.items():
            datasets.setdefault(key, []).append(loader_pass)
    if not datasets:
        places = [unread.source_line for rank in records for unread in rank.notes(UnreadData)]
        places = list(dict.fromkeys(places))
        return [not_seen(NAME, Sentence.NO_EVALUATION, places=places)] if places else []
    of_one_rank_each = all(len(passes) == 1 for passes in datasets.values())
    if of_one_rank_each and all(evaluations(rank) for rank in records):
        own = [evaluations(rank)[0] for rank in records]
        return rows_by_content(records, own, Sentence.EVALUATED_OWN_DATASETS)
    rows = [row for passes in datasets.values() for row in rows_of_dataset(records, passes)]
    by_reason: dict[Reason, list[ReportRow]] = {}
    for row in [row for row in rows if row.verdict != RIGHT] or rows[:1]:
        by_reason.setdefault(row.reason, []).append(row)
    return [
        replace(first, also=tuple(row.facts for row in others))
        for first, *others in by_reason.values()
    ]


def evaluations(rank: RankRecord) -> list[LoaderPass]:
    return [loader_pass for loader_pass in rank.loader_passes if is_evaluation(loader_pass)]


def is_evaluation(loader_pass: LoaderPass) -> bool:
    """Is this pass an evaluation? The script may disable gradients only per batch, or never."""
    is_complete = loader_pass.ended or loader_pass.batches_given >= loader_pass.most_batches
    without_backward = is_complete and not loader_pass.step_count and not loader_pass.backwards
    return bool(
        loader_pass.batches_given
        and loader_pass.steps_before
        and (not loader_pass.with_gradients or without_backward)
    )


def dataset_of(loader_pass: LoaderPass) -> tuple:
    return (str(loader_pass.fingerprint), loader_pass.dataset_length)


def rows_of_dataset(records: list[RankRecord], passes: list[LoaderPass]) -> list[ReportRow]:
    """Judge the first evaluation of a data set on each rank that evaluates it.

    The largest mistake comes first.
    """
    at, world_size = passes[0].source_line, len(records)
    if len(passes) < world_size:
        ranks = len(passes)
        return [right(NAME, Sentence.EVALUATED_BY_SOME, ranks=ranks, world_size=world_size, at=at)]
    if not all(loader_pass.indices for loader_pass in passes) or not same_dataset(passes):
        return rows_by_content(records, passes, Sentence.EVALUATED_UNKNOWN)
    if all(stops_early(loader_pass) for loader_pass in passes):
        return [row_of_a_part(passes)]
    size = sample_count(passes)
    drawn = [index for loader_pass in passes for index in loader_pass.indices]
    twice = len(drawn) - len({*drawn})
    lost = size - len({*drawn, *drawn_beside(records, passes[0])})
    samples = {"size": size, "at": at, "sampler": passes[0].sampler}
    if all(len({*loader_pass.indices}) >= NEARLY_ALL * size for loader_pass in passes):
        return [warning(NAME, Sentence.EVALUATED_BY_EACH, **samples)]
    rows = []
    if not all(map(may_be_summed, records, passes)):
        rows.append(warning(NAME, Sentence.EVALUATED_NOT_SUMMED, **samples))
    if twice and Flag.GATHERS_FOR_METRICS not in records[0].flags:
        rows.append(warning(NAME, Sentence.EVALUATED_TWICE, twice=twice, **samples))
    elif lost > 0:
        rows.append(warning(NAME, Sentence.EVALUATED_NOT_ALL, lost=lost, **samples))
    return rows or [right(NAME, Sentence.EVALUATED_ONCE, **samples)]


def rows_by_content(
    records: list[RankRecord], passes: list[LoaderPass], unknown: Reason
) -> list[ReportRow]:
    """Judge streams, and data sets that differ by rank, by the contents of their samples.

    unknown: the reason to give if the contents do not tell, either.
    """
    at, contents = passes[0].source_line, [{*loader_pass.checksums} for loader_pass in passes]
    drawn = sum(len(loader_pass.checksums) for loader_pass in passes)
    size, distinct_per_rank = len(set().union(*contents)), sum(map(len, contents))
    if distinct_per_rank < drawn / 2 or not all(contents):  # too many samples look alike
        return [not_seen(NAME, unknown, at=at)]
    facts = {"size": size, "twice": distinct_per_rank - size, "at": at}
    ended = all(loader_pass.ended for loader_pass in passes)
    if ended and all(of_rank == contents[0] for of_rank in contents):
        return [warning(NAME, Sentence.EVALUATED_BY_EACH, **facts)]
    if distinct_per_rank - size > 0.05 * size:
        return [warning(NAME, Sentence.EVALUATED_SHARED, **facts)]
    if all(map(may_be_summed, records, passes)):
        return [right(NAME, Sentence.EVALUATED_APART, **facts)]
    if unknown == Sentence.EVALUATED_OWN_DATASETS:  # perhaps they are not parts of one data set
        return [not_seen(NAME, unknown, at=at)]
    return [warning(NAME, Sentence.EVALUATED_NOT_SUMMED, **facts)]


def stops_early(loader_pass: LoaderPass) -> bool:
    """Did the script, not prove, end this evaluation before the end of its loader?"""
    longest = loader_pass.most_batches * (1 if loader_pass.with_gradients else EVALUATION_FACTOR)
    given = loader_pass.batches_given
    return not loader_pass.ended and given < min(loader_pass.batches_listed or 0, longest)


def row_of_a_part(passes: list[LoaderPass]) -> ReportRow:
    """Judge a loop with a break: are its samples those that one rank would take?"""
    first = passes[0]
    drawn = [
        index
        for loader_pass in passes
        for index in loader_pass.indices[: loader_pass.batches_given * loader_pass.sizes[0]]
    ]
    facts = {
        "given": first.batches_given, "batches": first.batches_listed,
        "samples": len({*drawn}), "size": sample_count(passes), "at": first.source_line,
    }  # fmt: skip
    if {*drawn} == {*range(len(drawn))}:
        return right(NAME, Sentence.EVALUATED_FIRST_ONES, **facts)
    return warning(NAME, Sentence.EVALUATED_OTHERS, **facts)


def drawn_beside(records: list[RankRecord], first: LoaderPass) -> set[int]:
    """Return the samples of all evaluations of this data set between the same two steps.

    The script may have a second loader for the last samples.
    """
    passes = [
        loader_pass
        for rank in records
        for loader_pass in evaluations(rank)
        if dataset_of(loader_pass) == dataset_of(first)
    ]
    return {
        i
        for loader_pass in passes
        if loader_pass.steps_before == first.steps_before
        for i in loader_pass.indices
    }


def may_be_summed(rank: RankRecord, evaluated: LoaderPass) -> bool:
    """Does a collective that may sum the results follow, before training goes on?

    Collectives of DDP, or of a BatchNorm layer left in training mode, do not sum results.
    """
    later = [each for each in rank.loader_passes if each.pass_index > evaluated.pass_index]
    trained = [each for each in later if each.with_gradients and not is_evaluation(each)]
    end = trained[0].collectives_before if trained else len(rank.collectives)
    calls = [
        call for call in rank.collectives[evaluated.collectives_before : end] if not call.is_of_ddp
    ]
    sums = [call for call in calls if not (call.batchnorm or "barrier" in call.name)]
    return end >= MAX_COLLECTIVES or bool(sums)


PLANTED = (
    plain(
        "evaluation with padding", WARNING, NAME,
        (
            "DataLoader(shard, batch_size=8)",
            "DataLoader(dataset, 8, sampler=DistributedSampler(dataset, shuffle=False))",
        ),
    ),
    plain(
        "evaluation leaves samples out, and computes gradients", WARNING, NAME,
        ("@torch.no_grad()\n", ""),
        ("DataLoader(shard, batch_size=8)", "DataLoader(shard, batch_size=8, drop_last=True)"),
    ),
    plain(
        "each rank evaluates everything, and sums are added", WARNING, NAME,
        ("DataLoader(shard, batch_size=8)", "DataLoader(dataset, batch_size=8)"),
    ),
    plain(
        "each rank evaluates a part, and no sum follows", WARNING, NAME,
        ("    dist.all_reduce(totals)\n", ""),
    ),
    plain(
        "evaluation leaves samples out", WARNING, NAME,
        ("DataLoader(shard, batch_size=8)", "DataLoader(shard, batch_size=8, drop_last=True)"),
    ),
    plain(
        "each rank evaluates all of a second data set", WARNING, NAME,
        ("    train_set, test_set = ", "    more = Points(20, 0.0)\n    train_set, test_set = "),
        (
            "        test_loss, accuracy = evaluate(",
            "        with torch.no_grad():\n"
            "            sum(ddp.module(x).sum() for x, _ in DataLoader(more, 8))\n"
            "        test_loss, accuracy = evaluate(",
        ),
    ),
    plain(
        "evaluation stops early, and each rank has drawn its part", WARNING, NAME,
        ("DataLoader(shard, batch_size=8)", "DataLoader(shard, batch_size=8, shuffle=True)"),
        (
            "        totals[2] += len(labels)\n",
            "        totals[2] += len(labels)\n"
            "        if totals[2] == 8:\n"
            "            break\n",
        ),
    ),
    plain(
        "all ranks stop after the same samples", WARNING, NAME,
        ("DataLoader(shard, batch_size=8)", "DataLoader(dataset, batch_size=8)"),
        (
            "        totals[2] += len(labels)\n",
            "        totals[2] += len(labels)\n"
            "        if totals[2] == 8:\n"
            "            break\n",
        ),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ALL_RECORDS, watch, planted=PLANTED)
