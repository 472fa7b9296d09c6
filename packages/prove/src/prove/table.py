"""What does the reader see? A table of rows: verdict, check, evidence, the cure with its link."""

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

RIGHT, WRONG, WARNING, NOT_SEEN = "right", "WRONG", "warning", "not seen"
ORDER = (WRONG, WARNING, RIGHT, NOT_SEEN)
WIDTH, INDENT = 100, " " * 10
MOST_NAMES = 3  # of parameters or places in one row

PAGE = Path(__file__).resolve().with_name("cures.md")  # an installation brings it along


class See:
    """Headings of cures.md, which say more than a cure in the table can."""

    ACCURACY = "test-accuracy-differs-with-the-number-of-ranks"
    BUFFERS = "training-is-good-evaluation-is-bad-batchnorms-running-statistics"
    FILES = "filenotfounderror-while-saving-now-and-then-or-a-file-of-two-halves"
    HANG = "it-hangs"
    LOSS = "the-loss-is-not-that-of-one-process"
    NAN = "the-loss-is-nan"
    PRINTS = "every-line-is-printed-n-times"
    RATE = "a-larger-batch-learns-worse-which-learning-rate"
    SAME_ORDER = "every-epoch-has-the-same-order"
    UNEVEN = "the-last-batch-of-an-epoch-hangs"
    UNUSED = "expected-to-have-finished-reduction-in-the-prior-iteration-before-starting-a-new-one"


@dataclass
class ReportRow:
    """Its verdict is one of the four; its link is one of `See`."""

    verdict: str
    check: str
    evidence: str
    cure: str = ""
    link: str = ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def listed(names: list[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    text = separator.join(names[:MOST_NAMES])
    return text + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def right(check: str, evidence: str) -> ReportRow:
    return ReportRow(RIGHT, check, evidence)


def wrong(check: str, evidence: str, cure: str, link: str = "") -> ReportRow:
    return ReportRow(WRONG, check, evidence, cure, link)


def warning(check: str, evidence: str, cure: str, link: str = "") -> ReportRow:
    return ReportRow(WARNING, check, evidence, cure, link)


def not_seen(check: str, evidence: str) -> ReportRow:
    return ReportRow(NOT_SEEN, check, evidence)


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
