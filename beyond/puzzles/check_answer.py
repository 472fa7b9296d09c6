"""Find the mistake: hands out a script that looks right, and judges what you have made of it.

    python beyond/puzzles/check_answer.py 3          # first your copy, then the verdict
    python beyond/puzzles/check_answer.py 3 --hint   # what prove says about your copy
    python beyond/puzzles/check_answer.py            # which of the twelve are solved

An answer is right if two ranks compute what one rank computed before the change, in float64, if one
rank alone still computes it too, and if prove has nothing to say. (Where a puzzle leaves open in
which order the ranks take the samples, the two ranks must share those of one.) Nothing compares
your text with the answer.
"""

import ast
import difflib
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from common.options import Parser, UsageError, exit_on, int_at_least
from local_ranks.chapters import ROOT

sys.path.append(str(ROOT / "packages" / "prove"))

from evidence.reported import Story, stories
from evidence.run_prove import NOT_SEEN, PROOF, WARNING, WRONG, Answer, run_prove
from evidence.traces import FailedError, Start, Trace, traces

RUNS = ROOT / "runs" / "puzzles"
COST = ROOT / "benchmarks" / "results" / "puzzles.json"
EQUAL = 1e-9  # relative to the weights, in float64: the mistakes change a step by 1e-5 or more
MOST_LINES = 16  # an answer adds and removes at most so many


class Puzzle(NamedTuple):
    """A mistake that somebody reported, and what the reader is told of it."""

    story: Story
    number: int
    style: str
    belongs_to: str  # the page that teaches what one must know
    rows: list[str]  # rows of prove, which the answer turns right
    why_unseen: str  # if no row says WRONG
    measure: str  # what main() returns
    ranks_draw_apart: bool = False  # two ranks draw other random numbers than one
    order_is_free: bool = False  # two ranks may take the samples in another order than one

    @property
    def purpose(self) -> str:
        return ast.get_docstring(ast.parse(self.story.script)) or ""


PUZZLES = sorted(
    (Puzzle(story, **story.puzzle) for story in stories("puzzles")), key=lambda each: each.number
)


class Verdict(NamedTuple):
    is_right: bool
    text: str


class ScriptError(Exception):
    """The script fails; the text is one line."""


# What is right


def prove_answer(source: str) -> Answer:
    answer = run_prove(source)
    if answer.error:
        raise ScriptError(answer.error)
    return answer


def run(source: str, ranks: int, in_float64: bool = True, seed: int = 0) -> list[Trace]:
    """Trace each rank. Raises ScriptError if the script fails or its ranks wait for each other."""
    start = Start(ranks, in_float64=in_float64, seed=1000 * seed, as_program=False)
    try:
        of_ranks = traces(source, start)
    except FailedError as error:
        raise ScriptError(error.line) from None
    if not all(isinstance(trace.result, int | float) for trace in of_ranks):
        raise ScriptError("main() has to stay, and to return the number that it prints last")
    return of_ranks


@cache
def reference(source: str) -> Trace:
    """One process in float64, before any change: it averages nothing, so it has no mistake."""
    return run(source, ranks=1)[0]


def changed_lines(before: str, after: str) -> int:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return sum(line[0] in "+-" for line in list(lines)[2:])


def judge(puzzle: Puzzle, source: str) -> Verdict:
    """Is this script what the puzzle's should have been?"""
    if (changed := changed_lines(puzzle.story.script, source)) > MOST_LINES:
        return Verdict(False, f"{changed} lines are changed, and {MOST_LINES} are enough")
    try:
        return judge_runs(puzzle, source)
    except ScriptError as error:
        return Verdict(False, f"the script fails: {error}")


def judge_runs(puzzle: Puzzle, source: str) -> Verdict:
    right, one = reference(puzzle.story.script), run(source, ranks=1)[0]
    if text := difference(one, right):
        more = ". Other noise may be right elsewhere, but here" if puzzle.ranks_draw_apart else ""
        more += " rank 0 must draw what one rank draws" if more else ""
        return Verdict(False, f"one rank alone no longer computes what it did: {text}{more}")
    if text := compare_ranks(puzzle, one, *run(source, ranks=2)):
        return Verdict(False, text)
    answer = prove_answer(source)
    said = set(answer.checks(WRONG)) | ({PROOF} & set(answer.checks(NOT_SEEN)))
    said |= {check for check in puzzle.rows if check in answer.evidence}
    if said:
        return Verdict(False, f"prove still objects to: {', '.join(sorted(said))} (see HINT=1)")
    return Verdict(True, puzzle.story.mistake)


def compare_ranks(puzzle: Puzzle, one: Trace, first: Trace, second: Trace) -> str:
    """What two ranks compute else than one rank of the same script; nothing if they agree."""
    if not (puzzle.ranks_draw_apart or puzzle.order_is_free):
        for trace in (first, second):
            if text := difference(replace(trace, result=first.result), one):
                return f"two ranks do not compute what one rank computes: {text}"
        return ""
    if text := difference(second, first):
        return f"the two ranks do not train one model: {text}"
    if puzzle.order_is_free and (text := dealt_differently([first, second], one)):
        return f"the two ranks do not share the samples of one: {text}"
    draws = [*first.draws, *second.draws]
    if puzzle.ranks_draw_apart and (again := len(draws) - len({*draws})):
        return f"in {again} of {len(draws)} steps of the ranks, the noise has been drawn before"
    return ""


def dealt_differently(ranks: list[Trace], one: Trace) -> str:
    """Whether the ranks together take not each sample of one rank once; nothing if they do."""
    if len(ranks[0].weights) != len(one.weights):
        return f"{len(ranks[0].weights)} optimizer steps, expected {len(one.weights)}"
    taken, expected = Counter(x for rank in ranks for x in rank.samples), Counter(one.samples)
    if taken == expected:
        return ""
    left_out, again = (expected - taken).total(), (taken - expected).total()
    return f"of {expected.total()} samples, {left_out} are left out, and {again} come again"


def difference(trace: Trace, right: Trace) -> str:
    """What another rank, or another script, computed else; nothing if they agree."""
    if len(trace.weights) != len(right.weights):
        return f"{len(trace.weights)} optimizer steps, expected {len(right.weights)}"
    for step, (mine, expected) in enumerate(zip(trace.weights, right.weights, strict=True), 1):
        if mine.shape != expected.shape:
            return f"{mine.numel()} weights in step {step}, expected {expected.numel()}"
        apart = (mine - expected).norm() / expected.norm()
        if not apart <= EQUAL:  # nan differs, too
            return f"after step {step} of {len(right.weights)}, the weights differ by {apart:.0e}"
    if not abs(trace.result - right.result) <= EQUAL * abs(right.result):
        return f"the last number is {trace.result:.6g}, expected {right.result:.6g}"
    return ""


# What the reader sees


def read(script: Path) -> str:
    """Raises UsageError, one line, if this is no Python."""
    name = os.path.relpath(script)
    if not script.is_file():
        again = f"delete the folder {os.path.relpath(script.parent)} to begin again"
        raise UsageError(f"{name} is gone, expected your copy of the puzzle: {again}")
    try:
        source = script.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise UsageError(f"{name}, line {line}: {getattr(error, 'msg', error)}") from None
    return source


def show(puzzle: Puzzle, source: str) -> None:
    """What it prints on one rank, beside what it prints on two."""
    one, two = (run(source, ranks, in_float64=False)[0].printed for ranks in (1, 2))
    print(f"Puzzle {puzzle.number}, {puzzle.style}. {puzzle.purpose}\n")
    columns = [("one rank prints", "two ranks print")]
    columns += zip_longest(one.splitlines(), two.splitlines(), fillvalue="")
    for left, right in columns:
        print(f"  {left:44}{right}")


def cost(puzzle: Puzzle) -> str:
    """What the mistake cost in the runs that were measured, on average."""
    runs = json.loads(COST.read_text())["puzzles"][str(puzzle.number)]
    text = f"{puzzle.measure} {mean(runs['with']):.3f} with it, {mean(runs['without']):.3f} without"
    return f"{text} (mean of {len(runs['with'])} seeds)"


def solved(folder: Path) -> set[int]:
    file = folder / "solved.json"
    return set(json.loads(file.read_text())) if file.exists() else set()


def hand_out(puzzle: Puzzle, copy: Path, folder: Path) -> int:
    copy.parent.mkdir(parents=True)
    copy.write_text(puzzle.story.script)
    show(puzzle, puzzle.story.script)
    print(f"\nIts mistake is yours to find. Correct it in {os.path.relpath(copy)}, and type")
    print("the same once more. HINT=1 shows what prove says, and SHOW=1 this comparison.")
    return 0


def decide(puzzle: Puzzle, copy: Path, folder: Path) -> int:
    verdict = judge(puzzle, read(copy))
    print(f"{'Right' if verdict.is_right else 'Not yet'}: {verdict.text}")
    if not verdict.is_right:
        return 1
    numbers = sorted(solved(folder) | {puzzle.number})
    (folder / "solved.json").write_text(json.dumps(numbers))
    print(f"What it cost: {cost(puzzle)}.\nReported in {puzzle.story.report}")
    print(f"{len(numbers)} of {len(PUZZLES)} are solved.")
    return 0


def main() -> int:
    numbers = int_at_least(1, len(PUZZLES) + 1)
    parser = Parser(__doc__)
    add = parser.add_argument
    add("number", nargs="?", type=numbers, help="of the puzzle")
    add("--hint", action="store_true", help="what prove says about your copy")
    add("--show", action="store_true", help="what one rank and two ranks of your copy print")
    add("--folder", type=Path, default=RUNS, help="of your copies")
    args = parser.parse_args()
    if args.number is None:
        numbers_solved = solved(args.folder)
        for puzzle in PUZZLES:
            mark = "solved" if puzzle.number in numbers_solved else ""
            print(f"{puzzle.number:2}  {mark:8}{puzzle.style:23}{puzzle.purpose}")
        return 0
    puzzle = PUZZLES[args.number - 1]
    copy = args.folder / f"{puzzle.number:02}" / "train.py"
    if not copy.parent.exists():
        return hand_out(puzzle, copy, args.folder)
    source = read(copy)
    if args.hint:
        answer = prove_answer(source)
        print(answer.printed.rstrip())
        if not (answer.checks(WRONG) or answer.checks(WARNING)):
            print("prove has no objection: it sees the first steps of three epochs, nothing later")
    elif args.show:
        show(puzzle, source)
    else:
        return decide(puzzle, copy, args.folder)
    return 0


if __name__ == "__main__":
    with exit_on(UsageError, ScriptError, OSError):  # OSError: --folder cannot be used
        raise SystemExit(main())
