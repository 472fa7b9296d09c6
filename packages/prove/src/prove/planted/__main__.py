"""Does prove find the planted mistakes, and is it silent about the scripts that are right?

python -m prove.planted [WORDS OF A NAME]
"""

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from prove.errors import NotJudgedError
from prove.judge.table import RIGHT, WRONG, ReportRow
from prove.options import parse_args
from prove.planted.mistakes import HARMLESS, MISTAKES
from prove.processes import preload
from prove.prover import prove

HERE = Path(__file__).parent
SCRIPTS = ("plain", "accumulate", "amp", "iterable", "own_step")
RANKS = (1, 2, 3)
JOBS = 3  # at a time: ranks wait for each other more than they compute


class PlantedCase(NamedTuple):
    """A script, and a row that prove must print of it; check "": any row but a WRONG one."""

    name: str
    source: str
    ranks: int
    verdict: str = RIGHT
    check: str = ""
    original: str = ""


def apply_changes(script: str, changes: tuple[tuple[str, str], ...]) -> str:
    source = (HERE / f"{script}.py").read_text()
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{script}.py has not, once: {old!r}")
        source = source.replace(old, new)
    return source


def all_cases() -> list[PlantedCase]:
    listed = []
    for planted in (*MISTAKES, *HARMLESS):
        original = apply_changes(planted.script, planted.original) if planted.original else ""
        source = apply_changes(planted.script, planted.changes)
        listed.append(
            PlantedCase(planted.name, source, 2, planted.verdict, planted.check, original)
        )
    for script in SCRIPTS:
        source = (HERE / f"{script}.py").read_text()
        listed += [PlantedCase(f"clean {script}, {ranks} ranks", source, ranks) for ranks in RANKS]
    return listed


def rows_of_script(source: str, ranks: int, original: str) -> tuple[list[ReportRow], str]:
    """prove, in a folder of its own: as if it had been typed there."""
    home = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        os.chdir(folder)
        Path("train.py").write_text(source)
        options = ["--timeout=20"]
        if original:
            Path("single.py").write_text(original)
            options.append("--original=torchrun --nproc-per-node=1 single.py")
        command = f"torchrun --standalone --nproc-per-node={ranks} train.py"
        try:
            return prove(parse_args([*options, *command.split()]), lambda text: None), ""
        except NotJudgedError as error:
            return [], str(error)
        finally:
            os.chdir(home)


def judge_case(case: PlantedCase) -> dict:
    """For a mistake whether it is found, and for a script that is right what is said."""
    began = time.monotonic()
    rows, error = rows_of_script(case.source, case.ranks, case.original)
    not_right = [row for row in rows if row.verdict != RIGHT]
    lines = [f"{row.verdict} {row.check}: {row.evidence}" for row in not_right]
    rows_of_check = [row for row in rows if row.check == case.check]
    as_expected = not case.check or any(row.verdict == case.verdict for row in rows_of_check)
    if case.verdict == RIGHT:
        as_expected &= not error and all(row.verdict != WRONG for row in rows)
    return {
        "name": case.name, "verdict": case.verdict, "found": as_expected, "said": lines, "error": error,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def main() -> int:
    began, words, results = time.monotonic(), " ".join(sys.argv[1:]), []
    chosen = [case for case in all_cases() if words in case.name]
    preload()
    with ProcessPoolExecutor(JOBS, mp_context=get_context("fork")) as pool:
        for each in pool.map(judge_case, chosen):
            results.append(each)
            print(json.dumps(each), flush=True)
    mistakes = [each for each in results if each["verdict"] != RIGHT]
    found_mistakes = [each for each in mistakes if each["found"]]
    as_wrong = sum(each["verdict"] == WRONG for each in found_mistakes)
    false_alarms = sum(not each["found"] for each in results if each["verdict"] == RIGHT)
    print(
        f"{len(found_mistakes)} of {len(mistakes)} mistakes found, {as_wrong} of them as WRONG; "
        f"{false_alarms} of {len(results) - len(mistakes)} runs that are right called WRONG; "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(len(found_mistakes) < len(mistakes) or false_alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
