"""What does the reader see? A table of rows: verdict, check, evidence, the cure with its link.

A row is a value: its verdict, its reason, and the facts with their numbers. Its words are made from
these at the end, by the templates in reasons.py.
"""

import os
import string
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prove.reasons import Reason, See

RIGHT, WRONG, WARNING, NOT_SEEN = "right", "WRONG", "warning", "not seen"
ORDER = (WRONG, WARNING, RIGHT, NOT_SEEN)
WIDTH, INDENT = 100, " " * 10
MOST_NAMES = 3  # of parameters or places in one row

PAGE = Path(__file__).resolve().with_name("cures.md")  # an installation brings it along


class Wording(string.Formatter):
    """Lists are cut after some names; {apart:percent} and {n:count batch} have words of their own."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list | tuple) and not format_spec:
            return listed([str(part) for part in value])
        if format_spec == "percent":
            return percent(value)
        if format_spec.startswith("count "):
            return count(value, format_spec.removeprefix("count "))
        return str(super().format_field(value, format_spec))


def worded(template: str, facts: Mapping[str, Any]) -> str:
    return Wording().vformat(template, (), facts)


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.0e}"


@dataclass(frozen=True)
class ReportRow:
    """One verdict of the four, about one check. facts: what its reason's templates name."""

    verdict: str
    check: str
    reason: Reason
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def evidence(self) -> str:
        return worded(self.reason.value.evidence, self.facts)

    @property
    def cure(self) -> str:
        return worded(self.reason.value.cure, self.facts)

    @property
    def link(self) -> str:
        return self.reason.value.link or str(self.facts.get("link", ""))

    def as_json(self) -> dict[str, Any]:
        words = {"evidence": self.evidence, "cure": self.cure, "link": self.link}
        own = {"verdict": self.verdict, "check": self.check, "reason": self.reason.name}
        return own | words | {"facts": dict(self.facts)}


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def listed(names: list[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    text = separator.join(names[:MOST_NAMES])
    return text + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def made(verdict: str, check: str, reason: Any, old: Any, facts: Any) -> ReportRow:
    if isinstance(reason, str):
        cure, link = (*old, "", "")[:2]
        return ReportRow(verdict, check, Reason.OTHER, {"text": reason, "cure": cure, "link": link})
    return ReportRow(verdict, check, reason, facts)


def right(check: str, reason: Any, *old: Any, **facts: Any) -> ReportRow:
    return made(RIGHT, check, reason, old, facts)


def wrong(check: str, reason: Any, *old: Any, **facts: Any) -> ReportRow:
    return made(WRONG, check, reason, old, facts)


def warning(check: str, reason: Any, *old: Any, **facts: Any) -> ReportRow:
    return made(WARNING, check, reason, old, facts)


def not_seen(check: str, reason: Any, *old: Any, **facts: Any) -> ReportRow:
    return made(NOT_SEEN, check, reason, old, facts)


def table(rows: list[ReportRow]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: ORDER.index(row.verdict)):
        first = f"{row.verdict:9} {row.check:22} "
        body = textwrap.wrap(row.evidence, WIDTH - len(INDENT)) or [""]
        if len(body) == 1 and len(first + body[0]) <= WIDTH:
            lines.append(first + body[0])
        else:
            lines += [first.rstrip(), *(INDENT + line for line in body)]
        if not row.cure:
            continue
        cure = textwrap.wrap(f"-> {row.cure}", WIDTH - len(INDENT), subsequent_indent="   ")
        if row.link:  # as seen from the user's folder
            link = f"({os.path.relpath(PAGE)}#{row.link})"
            fits = len(f"{INDENT}{cure[-1]}  {link}") <= WIDTH
            cure[-1:] = [f"{cure[-1]}  {link}"] if fits else [cure[-1], f"   {link}"]
        lines += [INDENT + line for line in cure]
    return "\n".join(lines)
