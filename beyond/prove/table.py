"""The rows of the table: verdict, check, evidence, and the cure with its link."""

import textwrap
from dataclasses import dataclass

RIGHT, WRONG, WARNING, NOT_SEEN = "right", "WRONG", "warning", "not seen"
ORDER = (WRONG, WARNING, RIGHT, NOT_SEEN)
WIDTH = 100
PAGE = "docs/troubleshooting.md"


@dataclass
class Row:
    verdict: str
    check: str
    evidence: str
    cure: str = ""
    link: str = ""  # a heading of docs/troubleshooting.md


def table(rows: list[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: ORDER.index(row.verdict)):
        first, rest = f"{row.verdict:9} {row.check:22} ", " " * 10
        body = textwrap.wrap(row.evidence, WIDTH - len(rest)) or [""]
        if len(body) == 1 and len(first + body[0]) <= WIDTH:
            lines.append(first + body[0])
        else:
            lines += [first.rstrip(), *(rest + line for line in body)]
        link = f"  ({PAGE}#{row.link})" if row.link else ""
        if row.cure:
            cure = textwrap.wrap(f"-> {row.cure}", WIDTH - len(rest), subsequent_indent="   ")
            if link and len(cure[-1] + link) > WIDTH - len(rest):
                cure.append(" " + link)
            else:
                cure[-1] += link
            lines += [rest + line for line in cure]
    return "\n".join(lines)
