"""The table for other readers: Markdown for a pull request, and GitHub's annotations of lines.

GitHub puts a message at a line if a step prints it as a command; how, its documentation says:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from prove.cures import all_cures, explain_command, heading_of
from prove.judge.table import NOT_SEEN, WARNING, WRONG, ReportRow, in_order
from prove.rank_record import SourceLine, StrEnum


class Format(StrEnum):
    """How the table is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    GITHUB = "github"  # as text, with an annotation for each row to be read, and a summary


def as_markdown(rows: list[ReportRow], ending: str) -> str:
    """Write the table in Markdown, below its last line, and the cures that need more than one."""
    lines = ["### prove", "", escaped(ending)]
    if rows:
        lines += ["", "| verdict | check | what was seen |", "|---|---|---|"]
    for row in in_order(rows):
        verdict = f"**{row.verdict}**" if row.verdict == WRONG else row.verdict
        seen = escaped(row.evidence) + (f"<br>→ {escaped(row.cure)}" if row.cure else "")
        lines.append(f"| {verdict} | {escaped(row.check)} | {seen} |")
    links = dict.fromkeys(row.link for row in rows if row.verdict in (WRONG, WARNING) and row.link)
    for section in map(all_cures().__getitem__, links):
        heading, text = heading_of(section), section.partition("\n")[2].strip()
        lines += ["", "<details>", f"<summary>{escaped(heading)}</summary>", "", text, ""]
        lines.append("</details>")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Keep Markdown from reading a text of the script, and a table from ending a cell in it."""
    return re.sub(r"([\\`*_\[\]<>|~$])", r"\\\1", " ".join(text.split()))


def annotations(
    rows: list[ReportRow], unproven: Sequence[str], strict: bool = False, root: str = ""
) -> list[str]:
    """Write a command of GitHub for each row that is WRONG or a warning, or keeps from a proof.

    unproven: the checks without which the exit status says that nothing is proven. root: the folder
    of the repository, from which GitHub counts paths; by default, the current folder.
    """
    commands = []
    for row in in_order(rows):
        keeps_from_proof = row.verdict in (NOT_SEEN, WARNING) and row.check in unproven
        if row.verdict == WRONG or keeps_from_proof or (row.verdict == WARNING and strict):
            level = "error"
        elif row.verdict == WARNING:
            level = "warning"
        else:
            continue
        parts = [row.evidence, f"-> {row.cure}" * bool(row.cure)]
        parts.append(f"More: {explain_command(row.link)}" * bool(row.link))
        text = "\n".join(filter(None, parts))
        commands.append(annotation(level, f"prove: {row.check}", text, row.lines[:1], root))
    return commands


def annotation(
    level: str, title: str, text: str, lines: Sequence[SourceLine] = (), root: str = ""
) -> str:
    """Write one command of GitHub, at the first of these lines if there is one."""
    properties = {"title": title}
    for at in lines[:1]:
        place = {"file": os.path.relpath(at.file, root or "."), "line": str(at.line)}
        properties = place | properties
    listed = ",".join(f"{name}={for_property(value)}" for name, value in properties.items())
    return f"::{level} {listed}::{for_message(text)}"


def for_message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def for_property(text: str) -> str:
    return for_message(text).replace(":", "%3A").replace(",", "%2C")


def append_summary(text: str) -> None:
    """Show this Markdown on the page of the run, if GitHub has named a file for it."""
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(file).open("a") as f:
            f.write(f"{text}\n\n")
