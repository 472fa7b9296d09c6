"""What does prove say of the scripts in this folder, whose mistakes we know?

    python packages/prove/evidence/count.py planted               # all that were planted
    python packages/prove/evidence/count.py planted no set_epoch  # with these words in the name

Each answer is written into results/WHAT.json as soon as it is there; answers that are there from
another count, and are not counted again, stay. --resume counts only what is not there yet.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from cases import HERE, RIGHT, Case, planted
from run_prove import Answer, in_parallel, run_prove

RESULTS = HERE / "results"


class Counted(NamedTuple):
    """What a case came to, in a few words, and the answers that say so."""

    outcome: str
    is_as_expected: bool
    answers: dict[str, Answer]  # "script" and, if it is judged too, "cure"


def judge(case: Case) -> Counted:
    answer = run_prove(case.script, case.command, case.options, case.files, case.hashes_differ)
    is_said = not case.check or case.check in answer.checks(case.verdict)
    if case.verdict == RIGHT:
        is_said &= bool(answer.rows) and not answer.error and not answer.is_wrong
        outcome = "right" if is_said else "called WRONG"
    else:
        outcome = f"found as {case.verdict}" if is_said else "missed"
    return Counted(outcome, is_said, {"script": answer})


def chosen(what: str, words: str) -> list[Case]:
    return [case for case in planted() if words in case.name]


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()


def write(file: Path, results: dict[str, dict]) -> dict:
    """Returns how many cases have each outcome."""
    outcomes = dict(Counter(each["outcome"] for each in results.values()).most_common())
    summary = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "commit": commit(),
        "outcomes": outcomes,
        "cases": results,
    }
    file.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("planted",))
    parser.add_argument("words", nargs="*", help="of a name; default: all cases")
    parser.add_argument("--jobs", type=int, default=3, help="at a time; ranks mostly wait")
    parser.add_argument("--json", type=Path, help="default: results/WHAT.json")
    parser.add_argument("--resume", action="store_true", help="only what the file has not yet")
    args = parser.parse_args()
    file = args.json or RESULTS / f"{args.what}.json"
    results = json.loads(file.read_text())["cases"] if file.exists() else {}
    words = " ".join(args.words)
    cases = chosen(args.what, words)
    if not cases:
        parser.error(f"no case has {words!r} in its name, expected a part of one")
    cases = [case for case in cases if not (args.resume and case.name in results)]
    unexpected = 0
    outcomes = {}
    for case, counted in in_parallel(judge, cases, args.jobs):
        answers = {name: answer.as_json() for name, answer in counted.answers.items()}
        results[case.name] = {"outcome": counted.outcome, **answers}
        outcomes = write(file, results)
        unexpected += not counted.is_as_expected
        print(f"{counted.outcome}: {case.name}")
        for answer in counted.answers.values():
            lines = [*answer.lines, *([f"error: {answer.error}"] if answer.error else [])]
            print("".join(f"    {line}\n" for line in lines), end="", flush=True)
    print(f"{outcomes}, {unexpected} not as expected")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
