"""Does the evaluation count each sample once, over all ranks together?"""

from dataclasses import replace

from prove.judge.reasons import Reason
from prove.judge.run_reasons import RunReason
from prove.judge.samples import (
    NEARLY_ALL,
    same_dataset,
    sample_count,
    share_one_data_set,
    trained_loader_passes,
)
from prove.judge.table import RIGHT, Check, ReportRow, not_seen, right, warning
from prove.rank_record import EVALUATION_FACTOR, MOST_COLLECTIVES, LoaderPass, Note, RankRecord

CHECK = Check.EVALUATION


def evaluation_rows(records: list[RankRecord]) -> list[ReportRow]:
    """A row for each reason, with all places that have it."""
    if not share_one_data_set(records) or not trained_loader_passes(records):
        return []
    datasets: dict[tuple, list[LoaderPass]] = {}  # of each, the first evaluation by each rank
    for rank in records:
        first: dict[tuple, LoaderPass] = {}
        for loader_pass in evaluations(rank):
            first.setdefault(dataset_of(loader_pass), loader_pass)
        for key, loader_pass in first.items():
            datasets.setdefault(key, []).append(loader_pass)
    if not datasets:
        places = [at for rank in records for at in rank.unused_loaders.values()]
        places = list(dict.fromkeys(places))
        return [not_seen(CHECK, RunReason.NO_EVALUATION, places=places)] if places else []
    of_one_rank_each = all(len(passes) == 1 for passes in datasets.values())
    if of_one_rank_each and all(evaluations(rank) for rank in records):
        own = [evaluations(rank)[0] for rank in records]
        return rows_by_content(records, own, RunReason.EVALUATED_OWN_DATASETS)
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
    """Also if gradients are switched off in each batch only, or not at all."""
    is_complete = loader_pass.ended or loader_pass.batches_given >= loader_pass.limit
    without_backward = is_complete and not loader_pass.steps and not loader_pass.backwards
    return bool(
        loader_pass.batches_given
        and loader_pass.steps_before
        and (not loader_pass.with_gradients or without_backward)
    )


def dataset_of(loader_pass: LoaderPass) -> tuple:
    return (str(loader_pass.fingerprint), loader_pass.dataset_length)


def rows_of_dataset(records: list[RankRecord], passes: list[LoaderPass]) -> list[ReportRow]:
    """passes: the first evaluation of a data set on each rank that evaluates it. The largest
    mistake comes first."""
    at, world_size = passes[0].at, len(records)
    if len(passes) < world_size:
        ranks = len(passes)
        return [
            right(CHECK, RunReason.EVALUATED_BY_SOME, ranks=ranks, world_size=world_size, at=at)
        ]
    if not all(loader_pass.indices for loader_pass in passes) or not same_dataset(passes):
        return rows_by_content(records, passes, RunReason.EVALUATED_UNKNOWN)
    if all(stops_early(loader_pass) for loader_pass in passes):
        return [row_of_a_part(passes)]
    size = sample_count(passes)
    drawn = [index for loader_pass in passes for index in loader_pass.indices]
    twice = len(drawn) - len({*drawn})
    lost = size - len({*drawn, *drawn_beside(records, passes[0])})
    samples = {"size": size, "at": at, "sampler": passes[0].sampler}
    if all(len({*loader_pass.indices}) >= NEARLY_ALL * size for loader_pass in passes):
        return [warning(CHECK, RunReason.EVALUATED_BY_EACH, **samples)]
    rows = []
    if not all(map(may_be_summed, records, passes)):
        rows.append(warning(CHECK, RunReason.EVALUATED_NOT_SUMMED, **samples))
    if twice and Note.GATHERS_FOR_METRICS not in records[0].notes:
        rows.append(warning(CHECK, RunReason.EVALUATED_TWICE, twice=twice, **samples))
    elif lost > 0:
        rows.append(warning(CHECK, RunReason.EVALUATED_NOT_ALL, lost=lost, **samples))
    return rows or [right(CHECK, RunReason.EVALUATED_ONCE, **samples)]


def rows_by_content(
    records: list[RankRecord], passes: list[LoaderPass], unknown: Reason
) -> list[ReportRow]:
    """Of a stream, or of data sets of which each rank holds another. unknown: what to say if the
    contents do not tell, either."""
    at, contents = passes[0].at, [{*loader_pass.checksums} for loader_pass in passes]
    seen = sum(len(loader_pass.checksums) for loader_pass in passes)
    size, different = len(set().union(*contents)), sum(map(len, contents))
    if different < seen / 2 or not all(contents):  # samples that look alike
        return [not_seen(CHECK, unknown, at=at)]
    facts = {"size": size, "twice": different - size, "at": at}
    ended = all(loader_pass.ended for loader_pass in passes)
    if ended and all(of_rank == contents[0] for of_rank in contents):
        return [warning(CHECK, RunReason.EVALUATED_BY_EACH, **facts)]
    if different - size > 0.05 * size:
        return [warning(CHECK, RunReason.EVALUATED_SHARED, **facts)]
    if all(map(may_be_summed, records, passes)):
        return [right(CHECK, RunReason.EVALUATED_APART, **facts)]
    if unknown == RunReason.EVALUATED_OWN_DATASETS:  # perhaps they are no parts of one
        return [not_seen(CHECK, unknown, at=at)]
    return [warning(CHECK, RunReason.EVALUATED_NOT_SUMMED, **facts)]


def stops_early(loader_pass: LoaderPass) -> bool:
    """Was it the script, not we, that ended this evaluation before the end of its loader?"""
    longest = loader_pass.limit * (1 if loader_pass.with_gradients else EVALUATION_FACTOR)
    given = loader_pass.batches_given
    return not loader_pass.ended and given < min(loader_pass.batches or 0, longest)


def row_of_a_part(passes: list[LoaderPass]) -> ReportRow:
    """A loop with a break: are its samples those that one rank would take?"""
    first = passes[0]
    drawn = [
        index
        for loader_pass in passes
        for index in loader_pass.indices[: loader_pass.batches_given * loader_pass.sizes[0]]
    ]
    facts = {
        "given": first.batches_given, "batches": first.batches,
        "samples": len({*drawn}), "size": sample_count(passes), "at": first.at,
    }  # fmt: skip
    if {*drawn} == {*range(len(drawn))}:
        return right(CHECK, RunReason.EVALUATED_FIRST_ONES, **facts)
    return warning(CHECK, RunReason.EVALUATED_OTHERS, **facts)


def drawn_beside(records: list[RankRecord], first: LoaderPass) -> set[int]:
    """What all evaluations of this data set drew between the same two steps: there may be a second
    loader for the last samples."""
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
    """Does a collective follow an evaluation, before training goes on? Those of DDP, or of a
    BatchNorm layer which was not switched to eval mode, are no sum of results."""
    later = [each for each in rank.loader_passes if each.number > evaluated.number]
    trained = [each for each in later if each.with_gradients and not is_evaluation(each)]
    end = trained[0].collectives_before if trained else len(rank.collectives)
    calls = [
        call for call in rank.collectives[evaluated.collectives_before : end] if not call.is_of_ddp
    ]
    sums = [call for call in calls if not (call.batchnorm or "barrier" in call.name)]
    return end >= MOST_COLLECTIVES or bool(sums)
