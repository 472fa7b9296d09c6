"""The lists of the puzzles, and their answers: what each mistake is, who sees it, what it cost."""

import os
from pathlib import Path

from benchmarks.result_files import Results
from benchmarks.tables.pages import table
from judge_answer import COST, MISTAKES, PUZZLES, Puzzle, cost
from local_ranks.chapters import ROOT

PAGE = ROOT / "beyond" / "puzzles"  # the folder of the pages that hold these tables
GAPS = [puzzle for puzzle in PUZZLES.values() if puzzle.is_gap]


def path_to(target: Path) -> str:
    return os.path.relpath(target, PAGE)


def found_by(puzzle: Puzzle, runs: dict) -> str:
    if runs["WRONG"]:
        return f"In prove's table: WRONG {', '.join(runs['WRONG'])}."
    if puzzle.rows:
        return f"In prove's table: only a warning, {', '.join(puzzle.rows)}."
    return f"In prove's table: nothing. {puzzle.why_unseen}"


def answer(puzzle: Puzzle, runs: dict) -> str:
    story = puzzle.story
    change = "".join(story.diff.splitlines(keepends=True)[2:])  # without names of files
    repository, _, number = story.report.removeprefix("https://github.com/").rsplit("/", 2)
    return f"""
<details>
<summary>Answer {puzzle.number}: {puzzle.style}</summary>

{story.mistake} {found_by(puzzle, runs)}

What it cost: {cost(puzzle)}. Reported in [{repository}#{number}]({story.report}).

<!-- part of: {path_to(story.home / story.name / "cure.diff")} -->
```{"diff"}
{change}```

</details>
"""


def rows(puzzles: list[Puzzle]) -> str:
    return "".join(
        f"| {p.number} | [{p.style}]({path_to(p.story.home / p.story.name / 'train.py')}). "
        f"{p.purpose} | [{title(ROOT / p.belongs_to)}]({path_to(ROOT / p.belongs_to)}) |\n"
        for p in puzzles
    )


@table("gaps", "puzzles")
def gaps(_: Results) -> str:
    return f"""\
| N | script | after |
|---|---|---|
{rows(GAPS).rstrip()}"""


@table("puzzles", "puzzles")
def puzzles(_: Results) -> str:
    return f"""\
| N | script | what you need to know |
|---|---|---|
{rows(MISTAKES).rstrip()}"""


@table("answers", "puzzles")
def answers(results: Results) -> str:
    runs = results["puzzles"]  # of all puzzles, or in a quick run of the first
    seeds = len(runs["1"]["with"])
    measured = [p for p in MISTAKES if p.name in runs]
    text = "".join(answer(p, runs[p.name]) for p in measured)
    return f"""\
Each cost is the mean of {seeds} seeds on two ranks, in the precision that the script has \
([all of them]({path_to(COST)})).
{text.rstrip()}"""


def title(page: Path) -> str:
    """What the table calls it."""
    name = page.stem if page.stem != "README" else page.parent.name
    return name.split("_")[0] if name[0].isdigit() else name
