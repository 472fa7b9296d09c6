"""What does each mistake cost? Both scripts run with several seeds, and the page shows the means.

python beyond/puzzles/measure.py           # measures: some minutes; then it writes the page
python beyond/puzzles/measure.py --page    # only the page, from what was measured
"""

import tempfile
from argparse import ArgumentParser
from pathlib import Path

import common.ranks
from benchmarks import result_files
from common.chapters import ROOT
from judge import COST, cost, prove_rows
from prove import processes
from prove.judge.table import WARNING, WRONG
from traces import HERE, PUZZLES, Puzzle, traces

SEEDS = 10
PAGE = HERE / "README.md"
MARK = "<!-- measure.py writes what follows -->\n"
TO_ROOT = Path("..", "..")


def measured(puzzle: Puzzle) -> dict:
    """On two ranks, in the precision that the script has."""
    runs: dict = {"with": [], "without": [], "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        for kind, source in (("with", puzzle.path.read_text()), ("without", puzzle.answer)):
            script.write_text(source)
            for seed in range(SEEDS):
                trace = traces(script, 2, in_float64=False, seed=seed)[0]
                runs[kind].append(round(trace.result, 6))
            runs["steps"].append(len(trace.weights))
    rows = prove_rows(puzzle.path)
    for verdict in (WRONG, WARNING):
        runs[verdict] = sorted({row.check for row in rows if row.verdict == verdict})
    print(puzzle.number, {key: runs[key] for key in runs if "with" not in key}, cost_of(runs))
    return runs


def cost_of(runs: dict) -> str:
    with_it, without = (sum(runs[kind]) / SEEDS for kind in ("with", "without"))
    return f"{with_it:.4f} {without:.4f}"


def measure() -> None:
    processes.preload()
    common.ranks.start_method = "fork"
    where = result_files.provenance(command="python beyond/puzzles/measure.py")
    puzzles = {str(puzzle.number): measured(puzzle) for puzzle in PUZZLES}
    result_files.save(COST, {"provenance": where, "puzzles": puzzles})


def found_by(puzzle: Puzzle, runs: dict) -> str:
    if runs[WRONG]:
        return f"In prove's table: WRONG {', '.join(runs[WRONG])}."
    if puzzle.rows:
        return f"In prove's table: only a warning, {', '.join(puzzle.rows)}."
    return f"In prove's table: nothing. {puzzle.why_unseen}"


def answer(puzzle: Puzzle, runs: dict) -> str:
    repository, _, number = puzzle.report.removeprefix("https://github.com/").rsplit("/", 2)
    return f"""
<details>
<summary>Answer {puzzle.number}: {puzzle.style}</summary>

{puzzle.mistake} {found_by(puzzle, runs)}

What it cost: {cost(puzzle)}. Reported in [{repository}#{number}]({puzzle.report}).

<!-- an answer -->
```{"diff"}
{puzzle.diff.rstrip()}
```

</details>
"""


def page_part() -> str:
    results = result_files.load(COST.stem)
    rows = "".join(
        f"| {p.number} | [{p.style}]({p.script}) | {p.purpose} "
        f"| [{title(TO_ROOT / p.belongs_to)}]({TO_ROOT / p.belongs_to}) |\n"
        for p in PUZZLES
    )
    where, costs = results["provenance"], TO_ROOT / COST.relative_to(ROOT)
    answers = "".join(answer(p, results["puzzles"][str(p.number)]) for p in PUZZLES)
    return f"""{MARK}
| N | script | what it does | what you need to know |
|---|---|---|---|
{rows}
## Answers

Each cost is the mean of {SEEDS} seeds on two ranks, in the precision that the script has \
({where["hardware"]}, torch {where["torch"]}, {where["date"]}: [all of them]({costs})).
{answers}
Back to [the start](../../README.md).
"""


def title(page: Path) -> str:
    """What the table calls it."""
    name = page.stem if page.stem != "README" else page.parent.name
    return name.split("_")[0] if name[0].isdigit() else name


def write_page() -> None:
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + page_part())


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the page only")
    if not parser.parse_args().page:
        measure()
    write_page()
