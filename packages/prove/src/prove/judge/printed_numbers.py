"""Are the numbers that the script prints or logs those of one rank?

Numbers at the same position of the same line are compared. The control tells which numbers are not
results, such as times and speeds: they differ when the same ranks run again.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from prove.judge.reasons import Phrase
from prove.judge.replay import Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import ReplayCheck, ReportRow, right, warning
from prove.judge.wording import NUMBER, phrase
from prove.rank_record import RankRecord

STATISTIC = re.compile(
    r"(loss|acc\w*|accuracy|error|top.?[15]|mAP|ppl|perplexity|correct)\W{0,12}"
    rf"({NUMBER.pattern})",
    re.I,
)
DECIMAL = re.compile(r"(?<![\w.:])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.]*\d)")
NAME = re.compile(r"([A-Za-z][\w@/-]*)\W{0,6}$")  # the word before a number
NO_RESULT = re.compile(  # names; a learning rate or an epoch may depend on the number of ranks
    r"time|date|elapsed|eta|sec|duration|speed|fps|throughput|lr|rate|epoch|step|iter|progress|mem|"
    r"version|seed",
    re.I,
)
UNIT = re.compile(
    r"\s?(?:m?s|secs?|seconds?|min|minutes?|h|hours?|[KMGT]i?B|it|img|\w*/s)\b|\s?%\|"
)
MIN_DIGITS = 3  # shorter numbers without a known name could agree by chance


class PrintedNumber(NamedTuple):
    name: str
    text: str
    is_statistic: bool  # named like a loss or accuracy, so it needs no control

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def last_digit(self) -> float:
        digits, _, exponent = self.text.lower().partition("e")
        return float(10 ** (int(exponent or 0) - len(digits.partition(".")[2])))

    def is_near(self, other: "PrintedNumber", share: float) -> bool:
        limit = max(2 * self.last_digit, share * abs(other.value))
        return abs(self.value - other.value) <= limit


class Position(NamedTuple):
    """Says where a number stands among all that a run prints."""

    source_line: str
    line: int  # how many lines this source line has printed, with this one
    shape: str  # the line without its numbers
    position_in_line: int  # which number of the line it is


def numbers_in(line: str) -> Iterator[tuple[int, PrintedNumber]]:
    """Yield the named statistics of a line first, then its other decimal numbers.

    Each comes with its position: from -1 downward for statistics, from 0 upward among all numbers.
    A number with fewer than three digits is skipped, since two could agree by chance.
    """
    places = [match.start() for match in NUMBER.finditer(line)]
    known = [match.span(2) for match in STATISTIC.finditer(line)]
    for position, match in enumerate(STATISTIC.finditer(line)):
        yield -1 - position, PrintedNumber(match[1], match[2], True)
    for match in DECIMAL.finditer(line):
        if any(begin <= match.start() < end for begin, end in known):
            continue
        name = NAME.search(line[: match.start()])
        digits = re.sub(r"[eE].*|\D", "", match[0]).lstrip("0")
        is_result = not (name and NO_RESULT.search(name[1])) and not UNIT.match(line, match.end())
        if is_result and len(digits) >= MIN_DIGITS:
            position = sum(start < match.start() for start in places)
            yield position, PrintedNumber(name[1] if name else "a number", match[0], False)


def printed_numbers(record: RankRecord) -> dict[Position, PrintedNumber]:
    """List what is printed in the first epoch after a step, without learning rates."""
    numbers: dict[Position, PrintedNumber] = {}
    lines: dict[str, int] = {}
    rates = learning_rates(record)
    for text in record.printed:
        if not text.steps_before or not text.in_first_epoch:
            continue
        line = lines[text.source_line] = lines.get(text.source_line, 0) + 1
        shape = NUMBER.sub("#", text.text)
        for number, printed in numbers_in(text.text):
            is_rate = any(abs(printed.value - rate) <= printed.last_digit for rate in rates)
            if printed.is_statistic or not is_rate:
                shape_of_line = "" if printed.is_statistic else shape
                numbers[Position(text.source_line, line, shape_of_line, number)] = printed
    return numbers


def learning_rates(record: RankRecord) -> set[float]:
    steps = [step for optimizer in record.optimizers for step in optimizer.steps]
    of_steps = {rate for step in steps for rate in step.learning_rates}
    return of_steps | {rate for rates in record.rates_after_epochs for rate in rates}


def differences(replay: Replay) -> dict[Position, tuple[PrintedNumber, PrintedNumber]]:
    """Pair the numbers that differ between rank 0 of all ranks and the one rank."""
    one_numbers = printed_numbers(replay.one_rank_record)
    return {
        position: (number, one_numbers[position])
        for position, number in printed_numbers(replay.rank_0_record).items()
        if position in one_numbers and not number.is_near(one_numbers[position], 1e-3)
    }


def need_control(replay: Replay) -> bool:
    """Does a number differ that may not be a result? Only a control can tell."""
    return any(not number.is_statistic for number, _ in differences(replay).values())


def printed_rows(replay: Replay, control: list[RankRecord] | None = None) -> list[ReportRow]:
    """Compare the printed numbers. control: records of the same ranks, run again on their data."""
    check, one_numbers = ReplayCheck.PRINTED_NUMBERS, printed_numbers(replay.one_rank_record)
    numbers = {
        position: number for position, number in printed_numbers(replay.rank_0_record).items()
        if position in one_numbers and (number.is_statistic or control)
    }  # fmt: skip
    if control:
        again = printed_numbers(control[0])
        unsteady = {
            (position.source_line, position.shape, position.position_in_line)
            for position, number in numbers.items()
            if position not in again or not number.is_near(again[position], 0.0)
        }
        numbers = {
            position: number for position, number in numbers.items()
            if (position.source_line, position.shape, position.position_in_line) not in unsteady
        }  # fmt: skip
    differing: dict[str, dict[str, Any]] = {}  # the first difference of each source line
    for position, number in numbers.items():
        one = one_numbers[position]
        if not number.is_near(one, 1e-3):
            facts = {"name": number.name, "of_ranks": number.text, "of_one": one.text}
            difference = phrase(
                Phrase.PRINTED, world_size=len(replay.records), at=position.source_line, **facts
            )
            differing.setdefault(position.source_line, difference)
    if differing:
        return [warning(check, ReplayReason.NUMBERS_DIFFER, numbers=[*differing.values()])]
    return [right(check, ReplayReason.NUMBERS_OF_ONE_RANK, numbers=len(numbers))] if numbers else []
