"""The proof as a function, for tests and programs: its table as a value."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from prove.errors import ExitStatus, NotJudgedError, NotObservedError
from prove.judge.table import WARNING, WRONG, ReportRow


@dataclass
class Result:
    """The table, row by row: each has a verdict (one of RIGHT, WRONG, WARNING and NOT_SEEN), the
    name of its check, the evidence and a cure. unproven: the comparisons that are the proof, and
    have shown nothing."""

    rows: list[ReportRow]
    unproven: list[str]
    strict: bool = False  # then warnings count as WRONG

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
        """It was compared with one rank, and nothing is WRONG. There may be warnings, if not
        strict."""
        return not (self.wrong or self.unproven or (self.strict and self.warnings))


def check(command: list[str], *options: str, strict: bool = False) -> Result:
    """Run `python -m prove OPTIONS COMMAND` in a process of its own; return what it finds.

    Raises NotJudgedError if the script cannot be found, fails by itself, or trains nothing, and
    NotObservedError, which is one, too, if prove itself fails.
    """
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        file = Path(folder, "rows.json")
        line = [sys.executable, "-m", "prove", f"--json={file}", *options, *command]
        ended = subprocess.run(line, capture_output=True, text=True)
        if not file.exists():
            raise NotJudgedError(ended.stderr.strip()[-500:])
        written = json.loads(file.read_text())
    if written["error"]:
        kind = NotObservedError if ended.returncode == ExitStatus.OWN_ERROR else NotJudgedError
        raise kind(written["error"])
    from prove.checks import SENTENCES  # it imports torch, which the run above did by itself

    rows = [ReportRow.from_json(row, SENTENCES) for row in written["rows"]]
    return Result(rows, written["unproven"], strict)
