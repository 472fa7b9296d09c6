"""The table that the reader sees: verdict, check, evidence, and the cure with its link.

A row is a value: its verdict, its reason, and the facts with their numbers. Words are made from
these last: each check and replay_reasons.py hold the sentences, and wording.py fills in the facts.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prove.cures import explain_command
from prove.judge.reasons import Reason
from prove.judge.wording import Facts, in_words, join_names, number_with_noun, texts_in, with_texts
from prove.rank_record import SourceLine, StrEnum

RIGHT, WRONG, WARNING, NOT_SEEN = "right", "WRONG", "warning", "not seen"
ORDER = (WRONG, WARNING, RIGHT, NOT_SEEN)  # in the table
WORST_FIRST = (WRONG, WARNING, NOT_SEEN, RIGHT)
WIDTH, NAME_WIDTH, INDENT = 100, 22, " " * 10


class ReplayCheck(StrEnum):
    """Rows that need more than the run of all ranks, by the names that the table prints."""

    ONE_RANK = "one rank"  # this row and the next are the proof
    ORIGINAL = "the original"
    RANKS = "ranks"
    EPOCH_OF_ORIGINAL = "the original's epoch"
    RANDOM_DECISIONS = "random decisions"
    RANDOM_NUMBERS = "random numbers"
    BATCHNORM = "batchnorm"
    SCHEDULE = "schedule"
    PRINTED_NUMBERS = "printed numbers"


PROOF_OF: dict[str, str] = {
    ReplayCheck.ONE_RANK: "what is averaged",
    ReplayCheck.ORIGINAL: "the conversion",
}
RESUMING = "what a resumed run goes on with"


@dataclass(frozen=True)
class ReportRow:
    """One of the four verdicts about one check. `facts` fill the templates of its reason."""

    verdict: str
    check: str  # name of the check
    reason: Reason
    facts: Facts = field(default_factory=dict)
    also: tuple[Facts, ...] = ()  # facts of other lines with this reason and cure

    @property
    def evidence(self) -> str:
        places = (self.facts, *self.also)
        return join_names([in_words(self.reason.evidence, facts) for facts in places], "; ")

    @property
    def cure(self) -> str:
        return in_words(self.reason.cure, self.facts)

    @property
    def link(self) -> str:
        return self.reason.link

    @property
    def lines(self) -> list[SourceLine]:
        """List the lines of the user's code among its facts, that of the cause first."""
        texts = texts_in([self.facts, *self.also])
        return list(dict.fromkeys(text for text in texts if isinstance(text, SourceLine)))

    def as_json(self) -> dict[str, Any]:
        lines = [{"file": each.file, "line": each.line} for each in self.lines]
        words = {"evidence": self.evidence, "cure": self.cure, "link": self.link, "lines": lines}
        own = {"verdict": self.verdict, "check": self.check, "reason": self.reason.name}
        return own | words | {"facts": dict(self.facts), "also": [*map(dict, self.also)]}

    @classmethod
    def from_json(cls, row: dict[str, Any], sentences: dict[str, Reason]) -> "ReportRow":
        """Make a row from its JSON. sentences: all reasons of prove, by name."""
        lines = [SourceLine(f"{each['file']}:{each['line']}") for each in row["lines"]]
        facts, *also = (with_texts(each, lines) for each in (row["facts"], *row["also"]))
        return cls(row["verdict"], row["check"], sentences[row["reason"]], facts, tuple(also))


def right(check: str, reason: Reason, **facts: Any) -> ReportRow:
    return ReportRow(RIGHT, check, reason, facts)


def wrong(check: str, reason: Reason, **facts: Any) -> ReportRow:
    return ReportRow(WRONG, check, reason, facts)


def warning(check: str, reason: Reason, **facts: Any) -> ReportRow:
    return ReportRow(WARNING, check, reason, facts)


def not_seen(check: str, reason: Reason, **facts: Any) -> ReportRow:
    return ReportRow(NOT_SEEN, check, reason, facts)


def worst(rows: list[ReportRow]) -> str:
    """Return the worst verdict of these rows."""
    return min((row.verdict for row in rows), key=WORST_FIRST.index)


def in_order(rows: list[ReportRow]) -> list[ReportRow]:
    """Sort the rows as the table has them: what is WRONG comes first."""
    return sorted(rows, key=lambda row: ORDER.index(row.verdict))


def format_table(rows: list[ReportRow]) -> str:
    lines = []
    width = max([NAME_WIDTH, *(len(row.check) for row in rows)])
    for row in in_order(rows):
        first = f"{row.verdict:9} {row.check:{width}} "
        body = textwrap.wrap(row.evidence, WIDTH - len(INDENT)) or [""]
        if len(body) == 1 and len(first + body[0]) <= WIDTH:
            lines.append(first + body[0])
        else:
            lines += [first.rstrip(), *(INDENT + line for line in body)]
        if not row.cure:
            continue
        cure = textwrap.wrap(f"-> {row.cure}", WIDTH - len(INDENT), subsequent_indent="   ")
        if row.link:
            link = f"({explain_command(row.link)})"
            fits = len(f"{INDENT}{cure[-1]}  {link}") <= WIDTH
            cure[-1:] = [f"{cure[-1]}  {link}"] if fits else [cure[-1], f"   {link}"]
        lines += [INDENT + line for line in cure]
    return "\n".join(lines)


def unproven_checks(rows: list[ReportRow], checks: Sequence[str]) -> list[str]:
    """List the comparisons of the proof that were not made or whose difference may be meant."""
    decided = {row.check for row in rows if row.verdict in (RIGHT, WRONG)}
    decided -= {row.check for row in rows if row.verdict in (NOT_SEEN, WARNING)}
    return [check for check in checks if check not in decided]


def last_line(
    rows: list[ReportRow], unproven: Sequence[str], strict: bool, seconds: float | None = None
) -> str:
    """Count the rows, and say what is not proven. strict: warnings count as WRONG."""
    wrong, warned = (sum(row.verdict == each for row in rows) for each in (WRONG, WARNING))
    found, ending = f"{wrong} WRONG", ""
    if warned:
        found += f" and {number_with_noun(warned, 'warning')}"
        if strict:
            ending = "; --strict counts warnings as WRONG"
    if unproven:
        unknown = " and ".join(dict.fromkeys(PROOF_OF.get(each, RESUMING) for each in unproven))
        ending += f"; nothing is proven about {unknown}: see {' and '.join(unproven)}"
    duration = "" if seconds is None else f", in {seconds:.0f} s"
    return f"{found} of {len(rows)} checks{duration}{ending}"
