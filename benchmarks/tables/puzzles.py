"""The list of the puzzles, and their answers: what each mistake is, who sees it, what it cost."""

from pathlib import Path
from typing import Any

from benchmarks.result_files import Results
from benchmarks.tables.pages import table
from check_answer import COST, PUZZLES, cost
from local_ranks.chapters import ROOT

TO_ROOT = Path("..", "..")  # from the page
MISTAKES = TO_ROOT / "packages" / "prove" / "evidence" / "mistakes"


def found_by(puzzle: Any, runs: dict) -> str:
    if runs["WRONG"]:
        return f"In prove's table: WRONG {', '.join(runs['WRONG'])}."
    if puzzle.rows:
        return f"In prove's table: only a warning, {', '.join(puzzle.rows)}."
    return f"In prove's table: nothing. {puzzle.why_unseen}"


def answer(puzzle: Any, runs: dict) -> str:
    story = puzzle.story
    change = "".join(story.diff.splitlines(keepends=True)[2:])  # without names of files
    repository, _, number = story.report.removeprefix("https://github.com/").rsplit("/", 2)
    return f"""
<details>
<summary>Answer {puzzle.number}: {puzzle.style}</summary>

{story.mistake} {found_by(puzzle, runs)}

What it cost: {cost(puzzle)}. Reported in [{repository}#{number}]({story.report}).

<!-- part of: {MISTAKES}/{story.name}/cure.diff -->
```{"diff"}
{change}```

</details>
"""


@table("puzzles", "puzzles")
def puzzles(results: Results) -> str:
    rows = "".join(
        f"| {p.number} | [{p.style}]({MISTAKES}/{p.story.name}/train.py) | {p.purpose} "
        f"| [{title(TO_ROOT / p.belongs_to)}]({TO_ROOT / p.belongs_to}) |\n"
        for p in PUZZLES
    )
    runs = results["puzzles"]  # of all puzzles, or in a quick run of the first
    seeds = len(runs["1"]["with"])
    costs = TO_ROOT / COST.relative_to(ROOT)
    measured = [p for p in PUZZLES if str(p.number) in runs]
    answers = "".join(answer(p, runs[str(p.number)]) for p in measured)
    return f"""\
| N | script | what it does | what you need to know |
|---|---|---|---|
{rows}
## Answers

Each cost is the mean of {seeds} seeds on two ranks, in the precision that the script has \
([all of them]({costs})).
{answers.rstrip()}"""


def title(page: Path) -> str:
    """What the table calls it."""
    name = page.stem if page.stem != "README" else page.parent.name
    return name.split("_")[0] if name[0].isdigit() else name
