"""Does the resumed run go on with the samples that would have come next, in the same epoch?"""

from collections import Counter
from typing import Any

from prove.judge.reasons import Heading, Reason
from prove.judge.table import ReportRow, not_seen, right, warning, wrong
from prove.rank_record import RankRecord
from prove.resume.pairs import Pairs
from prove.resume.record import StepStart
from prove.resume.runs import Run

SAMPLES, EPOCH = "resume: order of samples", "resume: epoch"
INSIDE = (
    "save how many batches of the epoch the loader has given (not how many steps were made), and "
)
INSIDE += "skip as many when resuming; shuffle by seed + epoch, so that the order is the same again"


class Sentence(Reason):
    SAMPLES_GO_ON = "{steps:n step} on the same samples, in the same order, on each rank"
    SAMPLES_OF_ALL_GO_ON = "{samples} samples of all ranks together are those without a stop"
    OTHER_SIZE = (
        "a step of {ranks:n rank} trains on {samples} samples, and without a stop one of "
        "{ranks_before:n rank} on {samples_before}",
        "keep the samples of a step, of all ranks together: the batch size of a rank is theirs "
        "divided by the number of ranks; meant so only if the learning rate follows",
    )
    OTHER_SHARES = (
        "{ranks} ranks divide the samples otherwise than {ranks_before}, and prove cannot match "
        "their steps",
    )
    SAMPLES_REPEATED = (
        "after the stop, step {number} trains on the samples of step {earlier} (rank {rank}, {at})",
        "begin at the epoch after the one that was saved, and call sampler.set_epoch(epoch) before "
        "each",
        Heading.RESUME,
    )
    REPEATED_INSIDE = (
        "after the stop in the middle of an epoch, step {number} trains on the samples of step "
        "{earlier} (rank {rank}, {at})",
        INSIDE,
        Heading.RESUME,
    )
    INPUTS_REPEATED = (
        "after the stop, step {number} trains on what step {earlier} has had (rank {rank}, {at})",
        "draw the batches by a seed and the number of the step, or save the random states of all "
        "ranks",
        Heading.RESUME,
    )
    OTHER_CONTENTS = (
        "its samples have the same numbers as without a stop, and other contents ({at})",
        "make or read the data set the same way in each process: a fixed seed, sorted file names",
    )
    SAMPLES_OF_OTHER_RANK = (
        "after the stop, rank {rank} trains in step {number} on samples of rank {owner} ({at})",
        "the state of a sampler or of its generator belongs to one rank: gather those of all, or "
        "save a file for each",
    )
    OTHER_INSIDE = (
        "after the stop in the middle of an epoch, step {number} trains on other samples than "
        "without it (rank {rank}, {at}): some come twice in this epoch, and some never",
        INSIDE,
        Heading.RESUME,
    )
    OTHER_INPUTS = (
        "after the stop, step {number} trains on something else than without it, and on nothing of "
        "an earlier step (rank {rank}, {at})",
        "draw the batches by a seed and the number of the step; harmless if each run may draw its "
        "own",
    )
    OTHER_ORDER = (
        "after the stop, step {number} trains on other samples than without it, and on none of an "
        "earlier step (rank {rank}, {at})",
        "shuffle by seed + epoch, or save the state of the generator that shuffles; harmless if "
        "each run may have an order of its own",
    )
    UNSEEDED = (
        "another order or other data, unless both runs begin with the same seed: nobody seeds what "
        "shuffles or makes them ({at})",
        "a fixed seed: DistributedSampler(seed=...), or a generator of the loader",
    )
    NO_STEPS = (
        "no step follows, and without a stop {steps} do",
        "the number of the epoch that is saved must be that of the next one, or of the last one "
        "plus 1 when it is loaded",
    )
    MORE_EPOCHS = (
        "more steps follow after step {steps} than without a stop",
        "count the epochs that were done before the stop",
        Heading.RESUME,
    )
    FEWER_EPOCHS = (
        "it ends after {steps:n step}, and without a stop {more} follow",
        "save the epoch that comes next, once",
    )
    OTHER_EPOCH = (
        "its sampler has epoch {epoch}, and without a stop {wanted}",
        "begin at the epoch after the one that was saved",
    )
    OTHER_SAVED_EPOCH = (
        "it saves {name} = {epoch}, and without a stop {wanted}: an epoch comes twice, or is left "
        "out ({at})",
        "save the epoch that comes next, or add 1 when you load the one that was done",
        Heading.RESUME,
    )
    SAME_SAVED_EPOCH = "it saves {name} = {epoch}, as without a stop"
    EPOCH_NOT_KNOWN = (
        "no sampler has an epoch, none is saved, and both runs were ended before their last step",
        "look at the number of the epoch that the resumed run prints first",
    )
    SAME_EPOCH = "goes on with epoch {epoch}"
    AS_MANY_STEPS = "as many steps follow as without a stop"
    SAMPLES_NOT_KNOWN = ("prove does not see which samples the steps are made of",)
    SAMPLES_ARE_DRAWN = (
        "the samples have no numbers, and their contents are changed at random while they are "
        "loaded ({at})",
        "switch the augmentation off while you prove that it resumes",
    )


def samples_of(run: Run, rank: int, start: StepStart) -> Any:
    """Return the numbers of a step's samples in the data set, or checksums of their contents."""
    passes = {each.pass_index: each for each in run.ranks[rank].loader_passes}
    numbers: list[int] = []
    for pass_index, batch in start.batches:
        loader_pass = passes[pass_index]
        if not loader_pass.indices or batch > len(loader_pass.sizes):
            return start.contents
        before = sum(loader_pass.sizes[: batch - 1])
        numbers += loader_pass.indices[before : before + loader_pass.sizes[batch - 1]]
    return numbers or start.contents


def sample_rows(pairs: Pairs) -> list[ReportRow]:
    if not pairs.same_ranks:
        return [samples_of_other_ranks(pairs)]
    found: list[dict[str, Any]] = []
    steps = 0
    for rank, (one, other) in enumerate(pairs.ranks):
        wanted = [samples_of(pairs.straight, rank, start) for start in one]
        given = [samples_of(pairs.resumed, rank, start) for start in other]
        if not all(wanted) or not all(given):
            return [not_seen(SAMPLES, Sentence.SAMPLES_NOT_KNOWN)]
        if at := drawn_at(pairs.straight.ranks[rank]):
            pairs.same_samples = False
            return [not_seen(SAMPLES, Sentence.SAMPLES_ARE_DRAWN, at=at)]
        common = min(len(wanted), len(given))
        steps = max(steps, common)
        bad = next((i for i in range(common) if wanted[i] != given[i]), None)
        if bad is None:
            continue
        earlier = step_with(pairs.straight, rank, given[bad])
        others = [number for number in range(len(pairs.ranks)) if number != rank]
        owners = [other for other in others if step_with(pairs.straight, other, given[bad])]
        facts = {"step": bad + 1, "number": one[bad].number + 1, "rank": rank}
        place = other[bad].batches[-1:]
        passes = {each.pass_index: each for each in pairs.resumed.ranks[rank].loader_passes}
        at = passes[place[0][0]].source_line if place else other[bad].source_line
        found.append({**facts, "at": at, "earlier": earlier, "owner": next(iter(owners), None)})
    pairs.same_samples = not found
    if not found and (at := other_contents_at(pairs)):
        pairs.same_samples = False
        return [warning(SAMPLES, Sentence.OTHER_CONTENTS, at=at)]
    if not found:
        return [right(SAMPLES, Sentence.SAMPLES_GO_ON, steps=steps)] if steps else []
    worst = max(found, key=lambda facts: bool(facts["earlier"]))
    if worst["earlier"]:
        has_loader = any(start.batches for start in pairs.ranks[worst["rank"]][1])
        reason = Sentence.REPEATED_INSIDE if pairs.is_inside_epoch else Sentence.SAMPLES_REPEATED
        reason = reason if has_loader else Sentence.INPUTS_REPEATED
        return [wrong(SAMPLES, reason, **worst)]
    if of_other := next((facts for facts in found if facts["owner"] is not None), None):
        return [wrong(SAMPLES, Sentence.SAMPLES_OF_OTHER_RANK, **of_other)]
    if not any(start.batches for start in pairs.ranks[worst["rank"]][1]):
        return [warning(SAMPLES, Sentence.OTHER_INPUTS, **worst)]
    if pairs.is_inside_epoch:
        return [wrong(SAMPLES, Sentence.OTHER_INSIDE, **worst)]
    return [warning(SAMPLES, Sentence.OTHER_ORDER, **worst)]


def other_contents_at(pairs: Pairs) -> str:
    """Where is a loader made whose samples have other contents than in the straight run?"""
    for rank, (one, other) in enumerate(pairs.ranks):
        if all(a.contents == b.contents for a, b in zip(one, other, strict=False)):
            continue
        wanted = pairs.straight.ranks[rank].trained_passes[0]
        given = pairs.resumed.ranks[rank].trained_passes[0]
        is_random = any(wanted.drew) or (wanted.workers and wanted.workers_drew)
        if not is_random or wanted.fingerprint != given.fingerprint:
            return given.source_line
    return ""


def drawn_at(record: RankRecord) -> str:
    """Where is a loader made whose samples have no numbers, but random contents?"""
    passes = record.trained_passes
    drawn = (each for each in passes if any(each.drew) or (each.workers and each.workers_drew))
    return next((each.source_line for each in drawn if not each.indices), "")


def step_with(run: Run, rank: int, samples: Any) -> int:
    """Return the number of the step, from 1 on, that this rank makes with these samples, or 0."""
    starts = run.parts[rank].starts
    numbers = (start.number + 1 for start in starts if samples_of(run, rank, start) == samples)
    return next(numbers, 0)


def samples_of_other_ranks(pairs: Pairs) -> ReportRow:
    """Compare what all ranks train on together, as far as whole steps match."""

    def together(run: Run, first: int) -> list[Counter]:
        steps: dict[int, Counter] = {}
        for rank, part in enumerate(run.parts):
            for start in part.starts:
                if start.number >= first:
                    names = [str(each) for each in flattened(samples_of(run, rank, start))]
                    steps.setdefault(start.number, Counter()).update(names)
        return [steps[number] for number in sorted(steps)]

    sums: list[dict[int, Counter]] = []
    for run, first in ((pairs.straight, pairs.k), (pairs.resumed, 0)):
        so_far, by_count = Counter[str](), {}
        for step in together(run, first):
            so_far = so_far + step
            by_count[so_far.total()] = so_far
        sums.append(by_count)
    common = sums[0].keys() & sums[1].keys()
    facts = {"ranks": len(pairs.resumed.ranks), "ranks_before": len(pairs.straight.ranks)}
    pairs.same_samples = False  # steps are others, whatever they are made of
    sizes = [next(iter(counts), 0) for counts in sums]
    if sizes[0] != sizes[1]:
        facts |= {"samples": sizes[1], "samples_before": sizes[0]}
        return warning(SAMPLES, Sentence.OTHER_SIZE, **facts)
    if common and all(sums[0][count] == sums[1][count] for count in common):
        return right(SAMPLES, Sentence.SAMPLES_OF_ALL_GO_ON, samples=max(common))
    return not_seen(SAMPLES, Sentence.OTHER_SHARES, **facts)


def flattened(samples: Any) -> list:
    parts = [flattened(each) if isinstance(each, list) else [each] for each in samples]
    return [each for part in parts for each in part]


def epoch_rows(pairs: Pairs) -> list[ReportRow]:
    straight, resumed = pairs.straight, pairs.resumed
    left = straight.steps - pairs.k
    if left > 0 and not resumed.steps:
        return [wrong(EPOCH, Sentence.NO_STEPS, steps=left)]
    if not pairs.same_ranks:
        return []
    if resumed.steps < left and not resumed.goes_on:
        return [wrong(EPOCH, Sentence.FEWER_EPOCHS, steps=resumed.steps, more=left)]
    if resumed.goes_on and not straight.goes_on and resumed.steps >= left:
        return [wrong(EPOCH, Sentence.MORE_EPOCHS, steps=left)]
    epochs = [starts[0].epochs[:1] for starts in pairs.ranks[0] if starts]
    if len(epochs) == 2 and all(epochs):
        (wanted,), (epoch,) = epochs
        if epoch != wanted:
            row = warning if pairs.same_samples else wrong
            return [row(EPOCH, Sentence.OTHER_EPOCH, epoch=epoch, wanted=wanted)]
        return [right(EPOCH, Sentence.SAME_EPOCH, epoch=epoch)]
    if not straight.goes_on and not resumed.goes_on:
        return [right(EPOCH, Sentence.AS_MANY_STEPS)]
    return [saved_epoch_row(pairs)]


def saved_epoch_row(pairs: Pairs) -> ReportRow:
    """Compare the number of the epoch in what both runs save next."""
    for one, other in zip(pairs.straight.parts, pairs.resumed.parts, strict=False):
        saved = [each for each in one.saves if each.steps_before > pairs.k]
        again = [each for each in other.saves if each.steps_before]
        if [each.steps_before for each in saved] != [each.steps_before + pairs.k for each in again]:
            continue
        for wanted, given in zip(saved, again, strict=True):
            for name, epoch in wanted.content.items():
                found = given.content.get(name)
                is_epoch = "epoch" in name.rpartition(".")[2].lower() and type(epoch) is int
                if not is_epoch or type(found) is not int:
                    continue
                facts = {"name": name, "epoch": found}
                if found == epoch:
                    return right(EPOCH, Sentence.SAME_SAVED_EPOCH, **facts)
                facts |= {"wanted": epoch, "at": given.source_line}
                return wrong(EPOCH, Sentence.OTHER_SAVED_EPOCH, **facts)
    return not_seen(EPOCH, Sentence.EPOCH_NOT_KNOWN)
