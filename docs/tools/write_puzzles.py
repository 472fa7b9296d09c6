"""Write the list of the puzzles and their answers into the puzzles' page.

    python docs/tools/write_puzzles.py

`make pages-quick` calls it. What a mistake costs comes from benchmarks/results/puzzles.json.
"""

from pathlib import Path
from typing import Any

from benchmarks.result_files import load
from common.chapters import load_program
from repository_pages import ROOT

check_answer = load_program("beyond/puzzles", "check_answer")

PAGE = ROOT / "beyond" / "puzzles" / "README.md"
MARK = "<!-- docs/tools/write_puzzles.py writes what follows -->\n"
TO_ROOT = Path("..", "..")
MISTAKES = TO_ROOT / "packages" / "prove" / "evidence" / "mistakes"


def found_by(puzzle: Any, runs: dict) -> str:
    if runs["WRONG"]:
        return f"In prove's table: WRONG {', '.join(runs['WRONG'])}."
    if puzzle.rows:
        return f"In prove's table: only a warning, {', '.join(puzzle.rows)}."
    return f"In prove's table: nothing. {puzzle.why_unseen}"


def answer(puzzle: Any, runs: dict) -> str:
    story = puzzle.story
    repository, _, number = story.report.removeprefix("https://github.com/").rsplit("/", 2)
    return f"""
<details>
<summary>Answer {puzzle.number}: {puzzle.style}</summary>

{story.mistake} {found_by(puzzle, runs)}

What it cost: {check_answer.cost(puzzle)}. Reported in [{repository}#{number}]({story.report}).

<!-- an answer -->
```{"diff"}
{story.diff.rstrip()}
```

</details>
"""


def page_part() -> str:
    results = load(check_answer.COST.stem)
    rows = "".join(
        f"| {p.number} | [{p.style}]({MISTAKES}/{p.story.name}/train.py) | {p.purpose} "
        f"| [{title(TO_ROOT / p.belongs_to)}]({TO_ROOT / p.belongs_to}) |\n"
        for p in check_answer.PUZZLES
    )
    seeds = len(results["puzzles"]["1"]["with"])
    origin, costs = results["provenance"], TO_ROOT / check_answer.COST.relative_to(ROOT)
    answers = "".join(answer(p, results["puzzles"][str(p.number)]) for p in check_answer.PUZZLES)
    return f"""{MARK}
| N | script | what it does | what you need to know |
|---|---|---|---|
{rows}
## Answers

Each cost is the mean of {seeds} seeds on two ranks, in the precision that the script has \
({origin["hardware"]}, torch {origin["torch"]}, {origin["date"]}: [all of them]({costs})).
{answers}
Back to [the start](../../README.md).
"""


def title(page: Path) -> str:
    """What the table calls it."""
    name = page.stem if page.stem != "README" else page.parent.name
    return name.split("_")[0] if name[0].isdigit() else name


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + page_part())
    print(f"wrote the answers of {PAGE.relative_to(ROOT)}")
