"""Let prove judge the scripts of this folder, whose mistakes are known. From packages/prove:

    python -m evidence planted               # all planted mistakes
    python -m evidence planted no set_epoch  # with these words in the name
    python -m evidence broken 0-49 --json some.json

    planted    mistakes that we planted in five right scripts, and right scripts
    reported   mistakes that others reported, each also with its cure
    puzzles    mistakes that readers search for, each also with its cure
    generated  right scripts, each generated from a seed
    broken     generated scripts, each with a mistake that changes its weights
    oracle     checks in float64, without prove, that the generated scripts are right
    resume     scripts that are stopped and resumed, rightly and wrongly
    resume_reported  mistakes at a resume that others reported, each also with its cure
    resume_generated  generated scripts with lines that save and load, and one part left out
    resume_oracle  checks, without prove, what a stop changes in these scripts

The answers for all cases of a kind are written to results/KIND.json, and those for some of them
only to the file of --json. A file is written after each answer and keeps the answers for other
cases; --resume judges only the cases that the file lacks.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from evidence.case import Counted, judge
from evidence.generated.judged import judge_broken, judge_right
from evidence.generated.mistakes import MISTAKES
from evidence.generated.oracle import compare
from evidence.generated.resumed import judge_generated
from evidence.planted import planted_cases
from evidence.reported import stories, story
from evidence.reported_page import RESULTS, write_page
from evidence.resume_oracle import compare_with_a_run_that_never_stops, known_scripts
from evidence.resumed import judge_resumed, resumed_scripts
from evidence.run_prove import in_parallel

SEEDS = range(300)
RESUMED_SEEDS = 60  # of them, because each is started twelve times


class Kind(NamedTuple):
    names: list[str]
    judge: Callable[[str], Counted]


def judge_planted(name: str) -> Counted:
    return judge(planted_cases()[name])


def judge_reported(name: str) -> Counted:
    return judge(story(name).case)


def judge_seed(judge_one: Callable[[int], Counted], name: str) -> Counted:
    return judge_one(int(name))


def kinds(mistake: str) -> dict[str, Kind]:
    seeds = [str(seed) for seed in SEEDS]
    of_others = [each.name for each in stories("reported-50", "reported-20")]
    broken = partial(judge_broken, mistake=mistake)
    resumed = resumed_scripts()
    return {
        "planted": Kind([*planted_cases()], judge_planted),
        "reported": Kind(of_others, judge_reported),
        "puzzles": Kind([each.name for each in stories("puzzles")], judge_reported),
        "generated": Kind(seeds, partial(judge_seed, judge_right)),
        "broken": Kind(seeds, partial(judge_seed, broken)),
        "oracle": Kind(seeds, partial(judge_seed, compare)),
        "resume": Kind([*resumed], judge_resumed),
        "resume_reported": Kind([each.name for each in stories("resume")], judge_reported),
        "resume_generated": Kind(seeds[:RESUMED_SEEDS], partial(judge_seed, judge_generated)),
        "resume_oracle": Kind([*known_scripts()], compare_with_a_run_that_never_stops),
    }


def chosen(names: list[str], words: list[str]) -> list[str]:
    """Choose cases by name or seed, such as 7 or 0-49, or else by words in their names."""
    wanted = set()
    for word in words:
        ends = re.fullmatch(r"(\d+)-(\d+)", word)
        wanted |= {str(n) for n in range(int(ends[1]), int(ends[2]) + 1)} if ends else {word}
    exactly = [name for name in names if name in wanted]
    return exactly or [name for name in names if " ".join(words) in name]


def write(file: Path | None, results: dict[str, dict]) -> dict:
    """Write all answers to the file, if there is one; return how many cases each outcome has."""
    outcomes = dict(Counter(each["outcome"] for each in results.values()).most_common())
    git = ["git", "rev-parse", "--short", "HEAD"]
    summary = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "commit": subprocess.run(git, cwd=RESULTS, capture_output=True, text=True).stdout.strip(),
        "outcomes": outcomes,
    }
    if file:
        file.write_text(as_text(summary, results))
    return outcomes


def as_text(summary: dict, results: dict[str, dict]) -> str:
    """Format the answers as JSON with one line per case."""
    cases = ",\n".join(f" {json.dumps(n)}: {json.dumps(results[n])}" for n in results)
    return f'{json.dumps(summary)[:-1]}, "cases": {{\n{cases}\n}}}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=kinds(mistake=""))
    parser.add_argument("words", nargs="*", help="of names, or seeds; default: all")
    parser.add_argument("--jobs", type=int, default=3, help="at a time: ranks mostly wait")
    parser.add_argument("--json", type=Path, help="default: results/KIND.json, for all of them")
    parser.add_argument("--resume", action="store_true", help="only what the file has not yet")
    parser.add_argument("--mistake", choices=MISTAKES, help="of broken; default: by seed")
    args = parser.parse_intermixed_args()
    kind = kinds(args.mistake or "")[args.kind]
    names = chosen(kind.names, args.words) if args.words else kind.names
    if not names:
        given = " ".join(args.words)
        parser.error(f"no {args.kind} case is called {given!r}, expected a name or a part of one")
    file = args.json or (None if args.words or args.mistake else RESULTS / f"{args.kind}.json")
    results = json.loads(file.read_text()).get("cases", {}) if file and file.exists() else {}
    outcomes: dict[str, int] = {}
    unexpected = 0
    names = [name for name in names if not (args.resume and name in results)]
    for name, counted in in_parallel(kind.judge, names, args.jobs):
        answers = {key: answer.as_json() for key, answer in counted.answers.items()}
        results[name] = {"outcome": counted.outcome, **counted.facts, **answers}
        outcomes = write(file, results)
        unexpected += not counted.is_as_expected
        print(f"{counted.outcome}: {name}")
        for answer in counted.answers.values():
            lines = [*answer.lines, *([f"error: {answer.error}"] if answer.error else [])]
            print("".join(f"    {line}\n" for line in lines), end="", flush=True)
    print(f"{outcomes}, {unexpected} not as expected")
    if args.kind in ("reported", "resume_reported"):
        write_page()
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
