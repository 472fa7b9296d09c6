"""Find the mistake, or fill the gap: hands out a script, and judges what you have made of it.

    python beyond/puzzles/check_answer.py gap1       # first your copy, then the verdict
    python beyond/puzzles/check_answer.py 3          # the same, of a script with a mistake
    python beyond/puzzles/check_answer.py 3 --hint   # what prove says about your copy
    python beyond/puzzles/check_answer.py            # which of the sixteen are solved

judge_answer.py says what is right.

For a class: a folder for each student, with what this program has put into runs/puzzles.

    python beyond/puzzles/check_answer.py gap1 gap2 3 --csv class.csv --folder class/*
"""

import argparse
import os
import sys
from itertools import zip_longest
from pathlib import Path

from common.options import Parser, UsageError, exit_on
from grade_class import grade
from judge_answer import (
    MISTAKES,
    PUZZLES,
    WARNING,
    WRONG,
    Puzzle,
    ScriptError,
    cost,
    judge,
    prove_answer,
    run,
)
from local_ranks.chapters import ROOT
from progress import Progress, read

RUNS = ROOT / "runs" / "puzzles"


def name_of(text: str) -> str:
    """An argparse type: the name of a puzzle."""
    if text not in PUZZLES:
        gaps = len(PUZZLES) - len(MISTAKES)
        expected = f"expected 1 to {len(MISTAKES)}, or gap1 to gap{gaps}"
        raise argparse.ArgumentTypeError(f"got {text!r}, {expected}")
    return text


def show(puzzle: Puzzle, source: str) -> None:
    """What it prints on one rank, beside what it prints on two."""
    one, two = (run(source, ranks, in_float64=False)[0].printed for ranks in (1, 2))
    kind = "Gap" if puzzle.is_gap else "Puzzle"
    print(f"{kind} {puzzle.number}, {puzzle.style}. {puzzle.purpose}\n")
    columns = [("one rank prints", "two ranks print")]
    columns += zip_longest(one.splitlines(), two.splitlines(), fillvalue="")
    for left, right in columns:
        print(f"  {left:44}{right}")


def hand_out(puzzle: Puzzle, copy: Path, progress: Progress) -> int:
    copy.parent.mkdir(parents=True)
    copy.write_text(puzzle.story.script)
    progress.note(puzzle.name, "handed out")
    show(puzzle, puzzle.story.script)
    path = os.path.relpath(copy)
    if puzzle.is_gap:
        print(f"\nYOUR LINES are missing in {path}. Write them, and type")
    else:
        print(f"\nIts mistake is yours to find. Correct it in {path}, and type")
    print("the same once more. HINT=1 shows what our checker prove says about it, and SHOW=1")
    print("both columns again.")
    print(f"To run it: torchrun --standalone --nproc-per-node=2 {path}")
    return 0


def decide(puzzle: Puzzle, copy: Path, progress: Progress) -> int:
    source = read(copy)
    if sys.stdout.isatty():
        print("judging ...", flush=True)
    verdict = judge(puzzle, source)
    progress.note(puzzle.name, "right" if verdict.is_right else "not yet")
    print(f"{'Right' if verdict.is_right else 'Not yet'}: {verdict.text}")
    if not verdict.is_right:
        return 1
    if not puzzle.is_gap:
        print(f"What it cost: {cost(puzzle)}.")
    if puzzle.story.report:  # a class gets none
        print(f"Reported in {puzzle.story.report}")
    print(f"{len(progress.solved())} of {len(PUZZLES)} are solved; make puzzle lists them.")
    return 0


def list_all(progress: Progress) -> None:
    solved = progress.solved()
    for name, puzzle in PUZZLES.items():
        mark = "solved" if name in solved else ""
        print(f"{name:>4}  {mark:8}{puzzle.style:25}{puzzle.purpose}")


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("name", nargs="*", type=name_of, help="of the puzzle: 1, 2, … or gap1, gap2, …")
    add("--hint", action="store_true", help="what prove says about your copy")
    add("--show", action="store_true", help="what one rank and two ranks of your copy print")
    add("--folder", type=Path, nargs="+", default=[RUNS], help="of your copies; several: a class")
    add("--csv", type=Path, help="for a class: also append the rows to this file")
    args = parser.parse_args()
    if args.csv or len(args.folder) > 1:
        return grade(args.folder, args.name, args.csv)
    if len(args.name) > 1:
        parser.error(f"got {len(args.name)} names, expected one, or several folders: --folder A B")
    [folder] = args.folder
    progress = Progress(folder)
    if not args.name:
        list_all(progress)
        return 0
    [name] = args.name
    puzzle = PUZZLES[name]
    copy = folder / puzzle.folder / "train.py"
    if not copy.parent.exists():
        return hand_out(puzzle, copy, progress)
    source = read(copy)
    if args.hint:
        answer = prove_answer(source)
        print(answer.printed.rstrip())
        if not (answer.checks(WRONG) or answer.checks(WARNING)):
            print("prove has no objection: it sees the first steps of three epochs, nothing later")
    elif args.show:
        show(puzzle, source)
    else:
        return decide(puzzle, copy, progress)
    return 0


if __name__ == "__main__":
    with exit_on(UsageError, ScriptError, OSError):  # OSError: --folder cannot be used
        raise SystemExit(main())
