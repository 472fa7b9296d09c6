"""After more steps: the weights, what is printed, and what the next checkpoint holds."""

import math
import re
from collections import Counter
from typing import Any

from prove.judge.reasons import Heading, Reason
from prove.judge.table import ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import NUMBER
from prove.resume.pairs import LIMIT, TIME, Pairs, difference
from prove.resume.record import Saved
from prove.resume.runs import Run

LATER_WEIGHTS, PRINTED = "resume: later weights", "resume: printed numbers"
NEXT_CHECKPOINT = "resume: next checkpoint"
CHARACTERS_AROUND = 30
PRINTED_LIMIT = 1e-4
LIMIT_OF_TENSORS = 1e-4  # rounding grows from step to step
NO_ROUNDING, RANKS_THAT_ADD_ALIKE = 1e-9, 2  # a + b is b + a, whatever the order
MOST_ROUNDING, LEAST_MISTAKE = 1e-4, 1e-2  # of the change of the weights


class Sentence(Reason):
    SAME_LATER_WEIGHTS = (
        "equal to {apart:.0e} of their change before step {number}, after {steps:n more step}"
    )
    CLOSE_LATER_WEIGHTS = (
        "they differ by {apart:.0e} of their change before step {number}: much for rounding, and "
        "little for a mistake",
        "prove it once more, with --batches 16",
    )
    OTHER_LATER_WEIGHTS = (
        "they differ by {apart:percent} of their change before step {number}, most in {name} (rank "
        "{rank}), though all is equal at first",
        "something between two steps is not saved: a number in a Python variable (a counter, a "
        "running mean), a momentum of your own, a buffer",
        Heading.RESUME,
    )
    TINY_DIFFERENCE = (
        "they differ by {apart:.0e} of their change before step {number}, and two runs without a "
        "stop do not differ at all",
        "look for a number that nobody saves, in a Python variable: a counter, a running mean",
        Heading.RESUME,
    )
    FOLLOWS = ("not compared: they follow from what is WRONG above",)
    SAME_NUMBERS = "{numbers:n number}, as without a stop"
    OTHER_NUMBERS = (
        "{given} in place of {wanted} in {line!r} (rank {rank}, {at})",
        "save and load what the line is made from: the epoch, the best value, sums so far",
    )
    SAME_CHECKPOINT = "{values:n value} of it, as without a stop"
    OTHER_VALUE = (
        "it holds {name} = {given}, and without a stop {wanted} ({at})",
        "load what the checkpoint holds, and go on from there",
    )
    OTHER_TENSOR = (
        "its {name} differs by {apart:percent} from that without a stop ({at})",
        "load what the checkpoint holds, such as a moving average in a dict; if you do, look for a "
        "number that nobody saves, in a Python variable: an average's counter, a running mean",
        Heading.RESUME,
    )
    OTHER_TIME = (
        "it is saved after {steps:n more step}, and without a stop after {wanted} ({at})",
        "save and load the counter that decides when to save",
    )


def later_rows(pairs: Pairs) -> list[ReportRow]:
    rows = []
    if pairs.same_draws and pairs.same_samples:
        rows += later_weight_rows(pairs)
    return [*rows, *printed_rows(pairs), *checkpoint_rows(pairs)]


def later_weight_rows(pairs: Pairs) -> list[ReportRow]:
    """Compare the weights before the last common step, as a share of their change until then.

    With three ranks or more, DDP adds in another order in its first step than later, and rounds
    otherwise.
    """
    worst, last = 0.0, 0
    for rank, (one, other) in enumerate(pairs.ranks):
        last = min(len(one), len(other)) - 1
        if last < 1 or one[last].optimizer != other[last].optimizer:
            return []
        first = next(start for start in one if start.optimizer == one[last].optimizer)
        columns = (first.weights, one[last].weights, other[last].weights)
        inner = [[projection[0] for projection in column] for column in columns]
        changes = [abs(after - before) for before, after in zip(*inner[:2], strict=True)]
        apart = [abs(a - b) for a, b in zip(*inner[1:], strict=False)]
        share = math.hypot(*apart) / max(math.hypot(*changes), 1e-30)
        worst = max(worst, share)
        is_noise = max(map(difference, *columns[1:])) <= pairs.limit
        if share <= MOST_ROUNDING or is_noise:
            continue
        facts: dict[str, Any] = {"apart": share, "number": one[last].number + 1}
        if share < LEAST_MISTAKE:
            return [not_seen(LATER_WEIGHTS, Sentence.CLOSE_LATER_WEIGHTS, **facts)]
        name = pairs.name_of(one[last].optimizer, apart.index(max(apart)))
        facts |= {"name": name, "rank": rank}
        return [wrong(LATER_WEIGHTS, Sentence.OTHER_LATER_WEIGHTS, **facts)]
    number = pairs.ranks[0][0][last].number + 1
    if worst > NO_ROUNDING and not pairs.noise and len(pairs.ranks) <= RANKS_THAT_ADD_ALIKE:
        return [warning(LATER_WEIGHTS, Sentence.TINY_DIFFERENCE, apart=worst, number=number)]
    return [
        right(LATER_WEIGHTS, Sentence.SAME_LATER_WEIGHTS, apart=worst, number=number, steps=last)
    ]


def lines_of(run: Run, rank: int, first: int) -> dict[tuple, tuple[str, list[str]]]:
    """Return the numbers of each printed line, by source line, step and count there."""
    lines, counts = {}, Counter[tuple]()
    for text in run.ranks[rank].printed:
        if text.steps_before > first:
            line = TIME.sub("#", text.text)
            key = (text.source_line, text.steps_before - first, NUMBER.sub("#", line))
            place = (*key, counts[key])
            lines[place] = (text.text.strip(), NUMBER.findall(line))
            counts[key] += 1
    return lines


def printed_rows(pairs: Pairs) -> list[ReportRow]:
    """Compare numbers that two straight runs print alike."""
    compared = 0
    if not pairs.same_ranks:
        return []
    for rank in range(len(pairs.ranks)):
        one, again = lines_of(pairs.straight, rank, pairs.k), lines_of(pairs.control, rank, pairs.k)
        other = lines_of(pairs.resumed, rank, 0)
        for key in sorted(one.keys() & again.keys() & other.keys(), key=lambda each: each[1]):
            line, numbers = one[key]
            for wanted, repeated, given in zip(numbers, again[key][1], other[key][1], strict=True):
                is_whole = "." not in wanted
                trained_alike = pairs.same_draws and pairs.same_samples
                if wanted != repeated or not (is_whole or trained_alike):
                    continue
                compared += 1
                limit = 0.0 if is_whole else max(PRINTED_LIMIT, pairs.limit)
                if difference(float(wanted), float(given)) > limit:
                    facts = {"given": given, "wanted": wanted, "line": around(wanted, line)}
                    at = key[0]
                    return [warning(PRINTED, Sentence.OTHER_NUMBERS, rank=rank, at=at, **facts)]
    return [right(PRINTED, Sentence.SAME_NUMBERS, numbers=compared)] if compared else []


def around(number: str, line: str) -> str:
    """Return the part of a line around a number."""
    place = line.find(number)
    return line[max(0, place - CHARACTERS_AROUND) : place + len(number) + CHARACTERS_AROUND]


def is_of_command(value: Any, pairs: Pairs) -> bool:
    """Is this value a word of the command that resumes, and of no other?"""
    words = [set(re.split(r"[\s=]", " ".join(command))) for command in pairs.runs.both_commands()]
    return str(value) in words[1] - words[0]


def saves_of(run: Run, rank: int, first: int) -> list[tuple[int, Saved]]:
    saves = run.parts[rank].saves
    return [(each.steps_before - first, each) for each in saves if each.steps_before > first]


def checkpoint_rows(pairs: Pairs) -> list[ReportRow]:
    """Compare what is saved next, value by value, as far as two straight runs save the same."""
    compared = 0
    for rank in range(len(pairs.ranks) if pairs.same_ranks else 0):
        straight, control = (
            saves_of(run, rank, pairs.k) for run in (pairs.straight, pairs.control)
        )
        resumed = saves_of(pairs.resumed, rank, 0)
        for (when, one), (_, again), (later, other) in zip(
            straight, control, resumed, strict=False
        ):
            if when != later:
                facts = {"steps": later, "wanted": when, "at": other.source_line}
                return [warning(NEXT_CHECKPOINT, Sentence.OTHER_TIME, **facts)]
            for name, value in one.content.items():
                if difference(value, again.content.get(name)) > LIMIT or "(random" in name:
                    continue  # noise, or judged in draws.py
                is_exact = isinstance(value, int | str | None)
                if not is_exact and not (pairs.same_draws and pairs.same_samples):
                    continue
                compared += 1
                given = other.content.get(name)
                if is_of_command(given, pairs):
                    continue
                apart = difference(value, given)
                found: dict[str, Any] = {"name": name, "at": other.source_line}
                if apart <= (0 if is_exact else max(LIMIT_OF_TENSORS, 10 * pairs.limit)):
                    continue
                if isinstance(value, tuple) and isinstance(given, tuple):
                    found["apart"] = apart
                    return [wrong(NEXT_CHECKPOINT, Sentence.OTHER_TENSOR, **found)]
                found |= {"given": str(given)[:40], "wanted": str(value)[:40]}
                return [warning(NEXT_CHECKPOINT, Sentence.OTHER_VALUE, **found)]
    if compared:
        return [right(NEXT_CHECKPOINT, Sentence.SAME_CHECKPOINT, values=compared)]
    return []
