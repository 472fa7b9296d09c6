"""Is a script that trains on several GPUs right? From a test of your own:

assert prove.check(["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]).proven
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from prove.judge.table import WARNING, WRONG, ReportRow

__version__ = "0.1.0"


@dataclass
class Result:
    """The whole table. unproven: the comparisons that are the proof, and have shown nothing."""

    rows: list[ReportRow]
    unproven: list[str]
    strict: bool = False  # then warnings count as WRONG

    def having(self, verdict: str) -> list[ReportRow]:
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def wrong(self) -> list[ReportRow]:
        return self.having(WRONG)

    @property
    def warnings(self) -> list[ReportRow]:
        return self.having(WARNING)

    @property
    def proven(self) -> bool:
        """It was compared with one rank, and nothing is WRONG. There may be warnings, if not
        strict."""
        return not (self.wrong or self.unproven or (self.strict and self.warnings))


class NotJudgedError(Exception):
    """Nothing could be judged; its text is the one line that says why."""


def check(command: list[str], *options: str, strict: bool = False) -> Result:
    """What `python -m prove OPTIONS COMMAND` finds, run in a process of its own.

    Raises NotJudgedError if the script cannot be found, fails by itself, or trains nothing.
    """
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        file = Path(folder, "rows.json")
        line = [sys.executable, "-m", "prove", f"--json={file}", *options, *command]
        ended = subprocess.run(line, capture_output=True, text=True)
        if not file.exists():
            raise NotJudgedError(ended.stderr.strip()[-500:])
        written = json.loads(file.read_text())
    if written["error"]:
        raise NotJudgedError(written["error"])
    return Result(
        [ReportRow.from_json(row) for row in written["rows"]], written["unproven"], strict
    )
