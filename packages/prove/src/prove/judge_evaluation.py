"""Does the evaluation count each sample once, over all ranks together?"""

from dataclasses import replace

from prove.judge_data import ALL_BUT_A_FEW, same_dataset, sample_count, trained_passes
from prove.record import Pass, RankRecord
from prove.table import RIGHT, ReportRow, See, listed, not_seen, right, warning
from prove.watch_data import EVALUATION

CHECK = "evaluation"


def evaluation_rows(ranks: list[RankRecord]) -> list[ReportRow]:
    """A row for each cure that is needed, with all places that need it."""
    if len(ranks) < 2 or "groups of some ranks" in ranks[0].notes or not trained_passes(ranks):
        return []
    datasets: dict[tuple, list[Pass]] = {}  # of each, the first evaluation by each rank
    for rank in ranks:
        first: dict[tuple, Pass] = {}
        for this_pass in evaluations(rank):
            first.setdefault(dataset_of(this_pass), this_pass)
        for key, this_pass in first.items():
            datasets.setdefault(key, []).append(this_pass)
    if not datasets:
        text = "no pass over a loader without a backward, after a step"
        return [not_seen(CHECK, f"{text}; if yours comes later, raise --batches")]
    rows = [row_of_dataset(ranks, passes) for passes in datasets.values()]
    by_cure: dict[tuple[str, str], list[ReportRow]] = {}
    for row in [row for row in rows if row.verdict != RIGHT] or rows[:1]:
        by_cure.setdefault((row.verdict, row.cure), []).append(row)
    return [
        replace(alike[0], evidence=listed([row.evidence for row in alike], "; "))
        for alike in by_cure.values()
    ]


def evaluations(rank: RankRecord) -> list[Pass]:
    return [this_pass for this_pass in rank.passes if is_evaluation(this_pass)]


def is_evaluation(this_pass: Pass) -> bool:
    """Also if gradients are switched off in each batch only, or not at all."""
    is_complete = this_pass.ended or this_pass.given >= this_pass.limit
    without_backward = is_complete and not this_pass.steps and not this_pass.backwards
    return bool(
        this_pass.given
        and this_pass.steps_before
        and (not this_pass.with_gradients or without_backward)
    )


def dataset_of(this_pass: Pass) -> tuple:
    return (str(this_pass.fingerprint), this_pass.dataset_length)


def row_of_dataset(ranks: list[RankRecord], passes: list[Pass]) -> ReportRow:
    """passes: the first evaluation of a data set on each rank that evaluates it."""
    at = passes[0].at
    if len(passes) < len(ranks):
        return right(CHECK, f"by {len(passes)} of {len(ranks)} ranks ({at})")
    if not all(this_pass.indices for this_pass in passes) or not same_dataset(passes):
        return not_seen(CHECK, f"the samples of {at} cannot be told apart")
    if all(stops_early(this_pass) for this_pass in passes):
        return row_of_a_part(passes)
    size = sample_count(passes)
    drawn = [index for this_pass in passes for index in this_pass.indices]
    twice = len(drawn) - len({*drawn})
    lost = size - len({*drawn, *drawn_beside(ranks, passes[0])})
    if all(len({*this_pass.indices}) >= ALL_BUT_A_FEW * size for this_pass in passes):
        text = f"each rank evaluates all {size} samples ({at})"
        cure = "each rank a part, then all_reduce; no mistake if the results are not added up"
        return warning(CHECK, text, cure, See.ACCURACY)
    if twice and "gather_for_metrics" not in ranks[0].notes:
        text = f"{twice} of {size} samples are counted twice ({at}, {passes[0].sampler})"
        cure = "Subset(dataset, range(rank, len(dataset), world_size))"
        return warning(CHECK, text, cure, See.ACCURACY)
    if lost > 0:
        text = f"{lost} of {size} samples are left out ({at})"
        return warning(CHECK, text, "no drop_last for evaluation", See.ACCURACY)
    if not all(
        collectives_after(rank, this_pass) for rank, this_pass in zip(ranks, passes, strict=True)
    ):
        text = f"each rank evaluates a part of the {size} samples, and no collective follows ({at})"
        return warning(CHECK, text, "all_reduce sums and counts, then divide", See.ACCURACY)
    return right(CHECK, f"each of {size} samples once ({at})")


def stops_early(this_pass: Pass) -> bool:
    """Was it the script, not we, that ended this evaluation before the end of its loader?"""
    return not this_pass.ended and this_pass.given < min(
        this_pass.batches or 0, EVALUATION * this_pass.limit
    )


def row_of_a_part(passes: list[Pass]) -> ReportRow:
    """A loop with a break: are its samples those that one rank would take?"""
    first = passes[0]
    drawn = [
        index
        for this_pass in passes
        for index in this_pass.indices[: this_pass.given * this_pass.sizes[0]]
    ]
    text = f"each rank stops after {first.given} of {first.batches} batches"
    text += f": {len({*drawn})} of {sample_count(passes)} samples ({first.at})"
    if {*drawn} == {*range(len(drawn))}:
        return right(CHECK, f"{text}, the first ones, each once")
    cure = "choose this part before it is dealt out, with the same seed on all ranks"
    return warning(CHECK, f"{text}; on another number of ranks, others", cure, See.ACCURACY)


def drawn_beside(ranks: list[RankRecord], first: Pass) -> set[int]:
    """What all evaluations of this data set drew between the same two steps: there may be a second
    loader for the last samples."""
    passes = [
        this_pass
        for rank in ranks
        for this_pass in evaluations(rank)
        if dataset_of(this_pass) == dataset_of(first)
    ]
    return {
        i
        for this_pass in passes
        if this_pass.steps_before == first.steps_before
        for i in this_pass.indices
    }


def collectives_after(rank: RankRecord, evaluated: Pass) -> int:
    """How many collectives follow an evaluation, before training goes on."""
    later = [this_pass for this_pass in rank.passes if this_pass.number > evaluated.number]
    trained = [
        this_pass
        for this_pass in later
        if this_pass.with_gradients and not is_evaluation(this_pass)
    ]
    end = trained[0].collectives_before if trained else len(rank.collectives)
    return end - evaluated.collectives_before
