"""Does prove find the planted mistakes, and is it silent about the scripts that are right?

python -m prove.planted [WORDS OF A NAME]
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from prove.__main__ import parse_args, prove
from prove.planted.mistakes import HARMLESS, MISTAKES, Mistake
from prove.table import RIGHT, WRONG, Row

HERE = Path(__file__).parent
SCRIPTS = ("plain", "accumulate", "amp", "iterable")
RANKS = (1, 2, 3)


def broken(mistake: Mistake) -> str:
    source = (HERE / f"{mistake.script}.py").read_text()
    for old, new in mistake.changes:
        if source.count(old) != 1:
            raise ValueError(f"{mistake.script}.py has not, once: {old!r}")
        source = source.replace(old, new)
    return source


def judged(source: str, ranks: int) -> tuple[list[Row], str]:
    """prove, in a folder of its own: as if it had been typed there."""
    home = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        os.chdir(folder)
        Path("train.py").write_text(source)
        command = f"torchrun --standalone --nproc-per-node={ranks} train.py"
        try:
            return prove(parse_args(["--timeout=20", *command.split()]), lambda text: None)
        finally:
            os.chdir(home)


def results(words: str) -> Iterator[dict]:
    """For each mistake whether it is found, and for each script that is right what is said."""
    for mistake in MISTAKES:
        if words in mistake.name:
            began = time.monotonic()
            rows, error = judged(broken(mistake), 2)
            found = [r for r in rows if r.check == mistake.check and r.verdict == mistake.verdict]
            yield {
                "name": mistake.name, "script": mistake.script, "verdict": mistake.verdict,
                "found": bool(found), "evidence": found[0].evidence if found else error,
                "others": [f"{r.verdict} {r.check}" for r in rows if r.verdict != RIGHT],
                "seconds": time.monotonic() - began,
            }  # fmt: skip
    right = [(m.name, broken(m), 2) for m in HARMLESS]
    for script in SCRIPTS:
        source = (HERE / f"{script}.py").read_text()
        right += [(f"clean {script}, {ranks} ranks", source, ranks) for ranks in RANKS]
    for name, source, ranks in right:
        if words not in name:
            continue
        began = time.monotonic()
        rows, error = judged(source, ranks)
        said = [f"{r.verdict} {r.check}: {r.evidence}" for r in rows if r.verdict != RIGHT]
        wrong = bool(error) or any(r.verdict == WRONG for r in rows)
        yield {
            "name": name, "wrong": wrong, "said": said, "error": error,
            "right": sum(r.verdict == RIGHT for r in rows), "seconds": time.monotonic() - began,
        }  # fmt: skip


def main() -> int:
    began, listed = time.monotonic(), []
    for result in results(" ".join(sys.argv[1:])):
        listed.append(result)
        print(json.dumps(result), flush=True)
    planted = [r for r in listed if "found" in r]
    found = [r for r in planted if r["found"]]
    wrong = sum(r["verdict"] == WRONG for r in found)
    false = sum(r["wrong"] for r in listed if "wrong" in r)
    print(
        f"{len(found)} of {len(planted)} mistakes found, {wrong} of them as WRONG; "
        f"{false} of {len(listed) - len(planted)} runs that are right called WRONG; "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(len(found) < len(planted) or false > 0)


if __name__ == "__main__":
    sys.exit(main())
