"""What does each mistake of the puzzles cost? Both scripts run with several seeds."""

import tempfile
from pathlib import Path
from typing import Any

import check_answer
import traces
from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results
from local_ranks.ranks import NEW_PROCESSES
from prove import processes
from prove.judge.table import WARNING, WRONG

SEEDS = 10


def cost_of(puzzle: Any, seeds: int) -> Results:
    """On two ranks, in the precision that the script has."""
    runs: Results = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        for kind, source in (("with", puzzle.path.read_text()), ("without", puzzle.answer)):
            script.write_text(source)
            for seed in range(seeds):
                trace = traces.traces(script, 2, in_float64=False, seed=seed)[0]
                runs[kind].append(round(trace.result, 6))
    rows = check_answer.prove_rows(puzzle.path)
    for verdict in (WRONG, WARNING):
        runs[verdict] = sorted({row.check for row in rows if row.verdict == verdict})
    print(puzzle.number, puzzle.style, flush=True)
    return runs


def measure_puzzles(effort: Effort) -> Results:
    processes.preload()
    NEW_PROCESSES.start_method = "fork"  # torch is here already
    seeds, puzzles = (1, traces.PUZZLES[:1]) if effort.quick else (SEEDS, traces.PUZZLES)
    return {"puzzles": {str(puzzle.number): cost_of(puzzle, seeds) for puzzle in puzzles}}
