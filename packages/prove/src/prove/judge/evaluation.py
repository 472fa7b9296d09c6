"""Does the evaluation count each sample once, over all ranks together?"""

from dataclasses import replace

from prove.judge.data import NEARLY_ALL, same_dataset, sample_count, trained_loader_runs
from prove.judge.reasons import Reason
from prove.judge.run_reasons import RunReason
from prove.judge.table import RIGHT, ReportRow, not_seen, right, warning
from prove.rank_record import EVALUATION_FACTOR, MOST_COLLECTIVES, LoaderRun, Note, RankRecord

CHECK = "evaluation"


def evaluation_rows(records: list[RankRecord]) -> list[ReportRow]:
    """A row for each reason, with all places that have it."""
    if len(records) < 2 or Note.HAS_GROUPS in records[0].notes or not trained_loader_runs(records):
        return []
    datasets: dict[tuple, list[LoaderRun]] = {}  # of each, the first evaluation by each rank
    for rank in records:
        first: dict[tuple, LoaderRun] = {}
        for loader_run in evaluations(rank):
            first.setdefault(dataset_of(loader_run), loader_run)
        for key, loader_run in first.items():
            datasets.setdefault(key, []).append(loader_run)
    if not datasets:
        return [not_seen(CHECK, RunReason.NO_EVALUATION)]
    of_one_rank_each = all(len(loader_runs) == 1 for loader_runs in datasets.values())
    if of_one_rank_each and all(evaluations(rank) for rank in records):
        at = evaluations(records[0])[0].at
        return [not_seen(CHECK, RunReason.EVALUATED_OWN_DATASETS, at=at)]
    rows = [row_of_dataset(records, loader_runs) for loader_runs in datasets.values()]
    by_reason: dict[Reason, list[ReportRow]] = {}
    for row in [row for row in rows if row.verdict != RIGHT] or rows[:1]:
        by_reason.setdefault(row.reason, []).append(row)
    return [
        replace(first, also=tuple(row.facts for row in others))
        for first, *others in by_reason.values()
    ]


def evaluations(rank: RankRecord) -> list[LoaderRun]:
    return [loader_run for loader_run in rank.loader_runs if is_evaluation(loader_run)]


def is_evaluation(loader_run: LoaderRun) -> bool:
    """Also if gradients are switched off in each batch only, or not at all."""
    is_complete = loader_run.ended or loader_run.batches_given >= loader_run.limit
    without_backward = is_complete and not loader_run.steps and not loader_run.backwards
    return bool(
        loader_run.batches_given
        and loader_run.steps_before
        and (not loader_run.with_gradients or without_backward)
    )


def dataset_of(loader_run: LoaderRun) -> tuple:
    return (str(loader_run.fingerprint), loader_run.dataset_length)


def row_of_dataset(records: list[RankRecord], loader_runs: list[LoaderRun]) -> ReportRow:
    """loader_runs: the first evaluation of a data set on each rank that evaluates it."""
    at, world_size = loader_runs[0].at, len(records)
    if len(loader_runs) < world_size:
        ranks = len(loader_runs)
        return right(CHECK, RunReason.EVALUATED_BY_SOME, ranks=ranks, world_size=world_size, at=at)
    if not all(loader_run.indices for loader_run in loader_runs) or not same_dataset(loader_runs):
        return not_seen(CHECK, RunReason.EVALUATED_UNKNOWN, at=at)
    if all(stops_early(loader_run) for loader_run in loader_runs):
        return row_of_a_part(loader_runs)
    size = sample_count(loader_runs)
    drawn = [index for loader_run in loader_runs for index in loader_run.indices]
    twice = len(drawn) - len({*drawn})
    lost = size - len({*drawn, *drawn_beside(records, loader_runs[0])})
    samples = {"size": size, "at": at, "sampler": loader_runs[0].sampler}
    if all(len({*loader_run.indices}) >= NEARLY_ALL * size for loader_run in loader_runs):
        return warning(CHECK, RunReason.EVALUATED_BY_EACH, **samples)
    if twice and Note.GATHERS_FOR_METRICS not in records[0].notes:
        return warning(CHECK, RunReason.EVALUATED_TWICE, twice=twice, **samples)
    if lost > 0:
        return warning(CHECK, RunReason.EVALUATED_NOT_ALL, lost=lost, **samples)
    if not all(map(may_be_summed, records, loader_runs)):
        return warning(CHECK, RunReason.EVALUATED_NOT_SUMMED, **samples)
    return right(CHECK, RunReason.EVALUATED_ONCE, **samples)


def stops_early(loader_run: LoaderRun) -> bool:
    """Was it the script, not we, that ended this evaluation before the end of its loader?"""
    longest = loader_run.limit * (1 if loader_run.with_gradients else EVALUATION_FACTOR)
    return not loader_run.ended and loader_run.batches_given < min(loader_run.batches or 0, longest)


def row_of_a_part(loader_runs: list[LoaderRun]) -> ReportRow:
    """A loop with a break: are its samples those that one rank would take?"""
    first = loader_runs[0]
    drawn = [
        index
        for loader_run in loader_runs
        for index in loader_run.indices[: loader_run.batches_given * loader_run.sizes[0]]
    ]
    facts = {
        "given": first.batches_given, "batches": first.batches,
        "samples": len({*drawn}), "size": sample_count(loader_runs), "at": first.at,
    }  # fmt: skip
    if {*drawn} == {*range(len(drawn))}:
        return right(CHECK, RunReason.EVALUATED_FIRST_ONES, **facts)
    return warning(CHECK, RunReason.EVALUATED_OTHERS, **facts)


def drawn_beside(records: list[RankRecord], first: LoaderRun) -> set[int]:
    """What all evaluations of this data set drew between the same two steps: there may be a second
    loader for the last samples."""
    loader_runs = [
        loader_run
        for rank in records
        for loader_run in evaluations(rank)
        if dataset_of(loader_run) == dataset_of(first)
    ]
    return {
        i
        for loader_run in loader_runs
        if loader_run.steps_before == first.steps_before
        for i in loader_run.indices
    }


def may_be_summed(rank: RankRecord, evaluated: LoaderRun) -> bool:
    """Does a collective follow an evaluation, before training goes on? Those of a BatchNorm layer,
    which was not switched to eval mode, are no sum of results."""
    later = [loader_run for loader_run in rank.loader_runs if loader_run.number > evaluated.number]
    trained = [
        loader_run
        for loader_run in later
        if loader_run.with_gradients and not is_evaluation(loader_run)
    ]
    end = trained[0].collectives_before if trained else len(rank.collectives)
    calls = rank.collectives[evaluated.collectives_before : end]
    return end >= MOST_COLLECTIVES or any(not call.batchnorm for call in calls)
