"""What does prove say about generated scripts, all of which are right?

    python judge_scripts.py 0 300 [--jobs 2] [--json results.json] [--fault]

One WRONG is one too many. With --fault each loss is divided by a local count, and WRONG is right.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from generate import Change, Script, generate

HERE = Path(__file__).parent
PROOF = "one rank"
TIMEOUT = 60  # seconds without progress


class Row(NamedTuple):
    verdict: str
    check: str
    evidence: str


def rows_of(script: Script) -> tuple[list[Row], str]:
    """The one place that calls prove: its rows, and why there are none."""
    from prove import NotJudgedError
    from prove.options import parse_args
    from prove.prover import prove

    options = [f"--timeout={TIMEOUT}"]
    if script.alone:
        options.append(f"--alone={script.alone.replace('python', sys.executable)}")
    command = [sys.executable if word == "python" else word for word in script.command]
    try:
        rows = prove(parse_args([*options, *command]), lambda text: None)
    except NotJudgedError as error:
        return [], str(error)
    return [Row(row.verdict, row.check, row.evidence) for row in rows], ""


def preload() -> None:
    """What the ranks import, before they are forked."""

    from prove.processes import preload

    preload()


class Judgment(NamedTuple):
    seed: int
    pieces: dict[str, str]
    rows: list[Row]
    error: str
    seconds: float

    def rows_with(self, verdict: str) -> list[Row]:
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def is_wrong(self) -> bool:
        return bool(self.rows_with("WRONG"))

    @property
    def is_proven(self) -> bool:
        verdicts = {row.verdict for row in self.rows if row.check == PROOF}
        return verdicts == {"right"} and not self.is_wrong

    @property
    def reason(self) -> str:
        """Why nothing is proven, without the numbers and places of this script."""
        texts = [row.evidence for row in self.rows_with("not seen") if row.check == PROOF]
        text = self.error or (texts or ["no row"])[0]
        text = re.sub(r"\S*train\.py:\d+", "train.py:LINE", text.partition(", most in")[0])
        return re.sub(r"(?<![\w/])[\d.]+(e[+-]?\d+)?%?", "#", text)[:200]


def judge(seed: int, fault: bool = False, change: Change | None = None) -> Judgment:
    """In a folder of its own, as if the command had been typed there."""
    script = generate(seed, fault=fault, change=change)
    began, home = time.monotonic(), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="right-") as folder:
        os.chdir(folder)
        Path("train.py").write_text(script.text)
        try:
            rows, error = rows_of(script)
        except Exception as failure:  # prove's own, and a finding as any other
            rows, error = [], f"prove fails: {type(failure).__name__} {failure}"
        finally:
            os.chdir(home)
    return Judgment(seed, script.pieces, rows, error, round(time.monotonic() - began, 1))


def judge_with_fault(seed: int) -> Judgment:
    return judge(seed, fault=True)


def judge_all(seeds: Iterable[int], jobs: int, fault: bool = False) -> Iterator[Judgment]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    preload()
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(judge_with_fault if fault else judge, seeds)


def by_text(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """The seeds of each text, the most frequent first."""
    seeds: dict[str, list[int]] = defaultdict(list)
    for text, seed in pairs:
        if seed not in seeds[text]:
            seeds[text].append(seed)
    return dict(sorted(seeds.items(), key=lambda item: -len(item[1])))


def results_of(answers: list[Judgment]) -> dict:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    )
    reasons = [
        (each.reason, each.seed) for each in answers if not each.is_proven and not each.is_wrong
    ]
    warnings = [(row.check, each.seed) for each in answers for row in each.rows_with("warning")]
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "scripts": len(answers),
        "called WRONG": sum(each.is_wrong for each in answers),
        "proven": sum(each.is_proven for each in answers),
        "without a table": sum(bool(each.error) for each in answers),
        "seconds": round(sum(each.seconds for each in answers)),
        "WRONG": {
            str(each.seed): [f"{row.check}: {row.evidence}" for row in each.rows_with("WRONG")]
            for each in answers
            if each.is_wrong
        },
        "proven seeds": [each.seed for each in answers if each.is_proven],
        "not proven": by_text(reasons),
        "warnings": by_text(warnings),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fault", action="store_true")
    parser.add_argument("--only", type=int, nargs="+", help="these of the seeds")
    args = parser.parse_args()
    seeds = args.only or range(args.first, args.end)
    answers = []
    for each in judge_all(seeds, args.jobs, args.fault):
        answers.append(each)
        said = "WRONG" if each.is_wrong else "proven" if each.is_proven else "not proven"
        print(f"{each.seed:4} {said:10} {each.seconds:5} s  {json.dumps(each.pieces)}")
        for row in each.rows:
            is_proof = row.check == PROOF and row.verdict == "not seen"
            if row.verdict in ("WRONG", "warning") or is_proof:
                print(f"     {row.verdict} {row.check}: {row.evidence}")
        print(f"     error: {each.error}\n" * bool(each.error), end="", flush=True)
    results = results_of(answers)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(
        f"{results['called WRONG']} of {results['scripts']} called WRONG, "
        f"{results['proven']} proven, "
        f"{results['without a table']} without a table"
    )
    is_as_expected = results["called WRONG"] == (results["scripts"] if args.fault else 0)
    return int(not is_as_expected)


if __name__ == "__main__":
    sys.exit(main())
