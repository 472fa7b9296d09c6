"""What does each mistake cost? Both scripts run with several seeds, and the page shows the means.

python beyond/puzzles/measure.py           # measures: some minutes; then it writes the page
python beyond/puzzles/measure.py --page    # only the page, from cost.json
"""

import json
import os
import platform
import subprocess
import tempfile
from argparse import ArgumentParser
from datetime import date
from pathlib import Path

import torch

import common.ranks
from judge import cost, prove_rows
from prove import processes
from prove.table import WARNING, WRONG
from traces import HERE, PUZZLES, Puzzle, traces

SEEDS = 10
PAGE = HERE / "README.md"
MARK = "<!-- measure.py writes what follows -->\n"
STAGES = Path("..", "..")


def processor() -> str:
    """The name of the CPU; only Linux has the file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str:
    git = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(git, cwd=HERE, capture_output=True, text=True).stdout.strip() or "unknown"


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
    results = {
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "puzzles": {str(puzzle.number): measured(puzzle) for puzzle in PUZZLES},
    }
    (HERE / "cost.json").write_text(json.dumps(results, indent=1) + "\n")


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
    results = json.loads((HERE / "cost.json").read_text())
    rows = "".join(
        f"| {p.number} | [{p.style}]({p.script}) | {p.purpose} "
        f"| [{title(STAGES / p.belongs_to)}]({STAGES / p.belongs_to}) |\n"
        for p in PUZZLES
    )
    answers = "".join(answer(p, results["puzzles"][str(p.number)]) for p in PUZZLES)
    return f"""{MARK}
| N | script | what it does | what you need to know |
|---|---|---|---|
{rows}
## Answers

Each cost is the mean of {SEEDS} seeds on two ranks, in the precision that the script has \
({results["hardware"]}, torch {results["torch"]}, {results["date"]}).
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
