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

from prove.__main__ import parse_args, prove
from prove.launch import preload
from prove.planted.mistakes import HARMLESS, MISTAKES
from prove.table import RIGHT, WRONG, Row

HERE = Path(__file__).parent
SCRIPTS = ("plain", "accumulate", "amp", "iterable")
RANKS = (1, 2, 3)
JOBS = 3  # at a time: ranks wait for each other more than they compute


class Case(NamedTuple):
    """A script, and a row that prove must print of it; check "": any row but a WRONG one."""

    name: str
    source: str
    ranks: int
    verdict: str = RIGHT
    check: str = ""
    original: str = ""


def changed(script: str, changes: tuple[tuple[str, str], ...]) -> str:
    source = (HERE / f"{script}.py").read_text()
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{script}.py has not, once: {old!r}")
        source = source.replace(old, new)
    return source


def cases() -> list[Case]:
    listed = []
    for m in (*MISTAKES, *HARMLESS):
        original = changed(m.script, m.original) if m.original else ""
        listed.append(Case(m.name, changed(m.script, m.changes), 2, m.verdict, m.check, original))
    for script in SCRIPTS:
        source = (HERE / f"{script}.py").read_text()
        listed += [Case(f"clean {script}, {ranks} ranks", source, ranks) for ranks in RANKS]
    return listed


def judged(source: str, ranks: int, original: str) -> tuple[list[Row], str]:
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
            return prove(parse_args([*options, *command.split()]), lambda text: None)
        finally:
            os.chdir(home)


def result(case: Case) -> dict:
    """For a mistake whether it is found, and for a script that is right what is said."""
    began = time.monotonic()
    rows, error = judged(case.source, case.ranks, case.original)
    said = [f"{r.verdict} {r.check}: {r.evidence}" for r in rows if r.verdict != RIGHT]
    rows_of_check = [r for r in rows if r.check == case.check]
    found = not case.check or any(r.verdict == case.verdict for r in rows_of_check)
    if case.verdict == RIGHT:
        found &= not error and all(r.verdict != WRONG for r in rows)
    return {
        "name": case.name, "verdict": case.verdict, "found": found, "said": said, "error": error,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def main() -> int:
    began, words, listed = time.monotonic(), " ".join(sys.argv[1:]), []
    chosen = [case for case in cases() if words in case.name]
    preload()
    with ProcessPoolExecutor(JOBS, mp_context=get_context("fork")) as pool:
        for each in pool.map(result, chosen):
            listed.append(each)
            print(json.dumps(each), flush=True)
    planted = [r for r in listed if r["verdict"] != RIGHT]
    found = [r for r in planted if r["found"]]
    as_wrong = sum(r["verdict"] == WRONG for r in found)
    false = sum(not r["found"] for r in listed if r["verdict"] == RIGHT)
    print(
        f"{len(found)} of {len(planted)} mistakes found, {as_wrong} of them as WRONG; "
        f"{false} of {len(listed) - len(planted)} runs that are right called WRONG; "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(len(found) < len(planted) or false > 0)


if __name__ == "__main__":
    sys.exit(main())
