"""Call the proof from a test or a program, and get its table as a value."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prove.errors import ExitStatus, NotJudgedError, NotObservedError
from prove.judge.table import WARNING, WRONG, ReportRow, format_table, last_line


@dataclass
class Result:
    """The table of a proof, row by row.

    unproven: the names of the comparisons that could not be decided. While one is listed, nothing
    is proven, even with 0 WRONG.
    """

    rows: list[ReportRow]
    unproven: list[str]
    strict: bool = False  # warnings count as WRONG

    def rows_with(self, verdict: str) -> list[ReportRow]:
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def wrong(self) -> list[ReportRow]:
        return self.rows_with(WRONG)

    @property
    def warnings(self) -> list[ReportRow]:
        return self.rows_with(WARNING)

    @property
    def proven(self) -> bool:
        """True if one rank computes the same and nothing is WRONG.

        There may be warnings, unless the result is strict.
        """
        return not (self.wrong or self.unproven or (self.strict and self.warnings))

    def __str__(self) -> str:
        """Return the table, with its last line, as `python -m prove` prints it."""
        return f"{format_table(self.rows)}\n\n{last_line(self.rows, self.unproven, self.strict)}"


def check(
    command: Sequence[str], *options: str, strict: bool = False, cwd: str | Path | None = None
) -> Result:
    """Run `python -m prove OPTIONS COMMAND` in a process of its own; return what it finds.

    cwd: the folder in which it runs; by default, the current one.

    Raises NotJudgedError if the script cannot be found, fails by itself, or trains nothing, and its
    subclass NotObservedError if prove itself fails.
    """
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        file = Path(folder, "rows.json")
        line = [sys.executable, "-m", "prove", f"--json={file}", *options, *command]
        ended = subprocess.run(line, capture_output=True, text=True, cwd=cwd)
        if not file.exists():
            raise NotJudgedError(ended.stderr.strip()[-500:])
        written = json.loads(file.read_text())
    if written["error"]:
        kind = NotObservedError if ended.returncode == ExitStatus.OWN_ERROR else NotJudgedError
        raise kind(written["error"])
    from prove.checks import SENTENCES  # imports torch, which a failed run above never needs

    rows = [ReportRow.from_json(row, SENTENCES) for row in written["rows"]]
    return Result(rows, written["unproven"], strict)
