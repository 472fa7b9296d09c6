"""Does a resumed run draw the random numbers that would have come next?"""

from prove.judge.reasons import Reason
from prove.judge.table import ReportRow, right, warning, wrong
from prove.random_state import GENERATORS
from prove.resume.pairs import Pairs

NAME = "resume: random numbers"
OWN = ["a generator of the script"]


class Sentence(Reason):
    SAME_DRAWS = "the same draws as without a stop ({generators})"
    ALL_RANKS_DRAW_ALIKE = (
        "all ranks draw the same, and without a stop each its own: the random state of one rank "
        "was given to all ({generators})",
        "save the states of all ranks (gather them, or a file for each), and give each its own",
    )
    OTHER_DRAWS_THAN_SAVED = (
        "other draws than without a stop, though the checkpoint holds random states: {name}",
        "set the states last, after all that draws: models, loaders, samplers",
    )
    DRAWS_AGAIN = (
        "draws the numbers of step {step} again ({generators})",
        "seed by seed + epoch, or save the random states of all ranks",
    )
    OTHER_DRAWS = (
        "other draws than without a stop ({generators}): training goes on, but not to the same "
        "bits",
        "seed each epoch by (seed, epoch, rank), or save the random states of all ranks; harmless "
        "if you need no equal runs",
    )


def draw_rows(pairs: Pairs) -> list[ReportRow]:
    """Judge the generators that everybody shares, and those that the script has made."""
    rows = shared_rows(pairs)
    steps = [pair for one, other in pairs.ranks for pair in zip(one, other, strict=False)]
    own = [a.own_generators != b.own_generators for a, b in steps]
    if not pairs.same_draws or not any(own):
        return rows
    pairs.same_draws = False
    firsts = [(one[0].own_generators, other[0].own_generators) for one, other in pairs.ranks]
    wanted, given = ({*digests} for digests in zip(*firsts, strict=True))
    if len(given) < len(wanted):
        return [wrong(NAME, Sentence.ALL_RANKS_DRAW_ALIKE, generators=OWN)]
    return [warning(NAME, Sentence.OTHER_DRAWS, generators=OWN)]


def shared_rows(pairs: Pairs) -> list[ReportRow]:
    """Judge only generators that are drawn from in the steps, or while samples are loaded."""
    straight = pairs.straight
    if not pairs.same_ranks:
        pairs.same_draws = False
        return []
    drawn = [
        number for number in range(len(GENERATORS))
        if any(start.at_batch[number] != start.at_step[number]
               for one, _ in pairs.ranks for start in one)
        or any(loader_pass.drew[number] for record in straight.ranks
               for loader_pass in record.trained_passes)
    ]  # fmt: skip
    firsts = [(one[0], other[0]) for one, other in pairs.ranks if one and other]
    if not drawn or not firsts:
        return []
    names = {"generators": [GENERATORS[number] for number in drawn]}
    pairs.same_draws = all(
        of_generators(a.at_batch, drawn) == of_generators(b.at_batch, drawn)
        or of_generators(a.at_step, drawn) == of_generators(b.at_step, drawn)  # seeded in the step
        for one, other in pairs.ranks
        for a, b in zip(one, other, strict=False)
    )
    if pairs.same_draws:
        return [right(NAME, Sentence.SAME_DRAWS, **names)]
    wanted = [of_generators(one.at_batch, drawn) for one, _ in firsts]
    given = [of_generators(other.at_batch, drawn) for _, other in firsts]
    if len({*given}) < len({*wanted}):
        return [wrong(NAME, Sentence.ALL_RANKS_DRAW_ALIKE, **names)]
    saved = [
        name for each in pairs.stopped.saves for name in each.content if "(random state)" in name
    ]
    if saved:
        return [wrong(NAME, Sentence.OTHER_DRAWS_THAN_SAVED, name=saved[0])]
    earlier = [start for start in straight.parts[0].starts if start.number < pairs.k]
    for number in drawn:
        digest = firsts[0][1].at_batch[number]
        step = next((each for each in earlier if each.at_batch[number] == digest), None)
        if step and digest != firsts[0][0].at_batch[number]:
            facts = {"step": step.number + 1, "generators": [GENERATORS[number]]}
            return [warning(NAME, Sentence.DRAWS_AGAIN, **facts)]
    return [warning(NAME, Sentence.OTHER_DRAWS, **names)]


def of_generators(digests: list[int], drawn: list[int]) -> tuple[int, ...]:
    return tuple(digests[number] for number in drawn)
