"""What does each mistake of the puzzles cost? Both scripts run with several seeds."""

import tempfile
from pathlib import Path
from typing import Any

import common.ranks
from benchmarks.measure.sections import section
from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results
from common.chapters import load_program
from prove import processes
from prove.judge.table import WARNING, WRONG

check_answer = load_program("beyond/puzzles", "check_answer")
traces = load_program("beyond/puzzles", "traces")

SEEDS = 10


def cost_of(puzzle: Any, seeds: int) -> Results:
    """Run a puzzle with and without its mistake, on two ranks, in the script's own precision."""
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


@section("puzzles")
def measure_puzzles(effort: Effort) -> Results:
    processes.preload()
    common.ranks.start_method = "fork"  # torch is here already
    seeds, puzzles = (1, traces.PUZZLES[:1]) if effort.quick else (SEEDS, traces.PUZZLES)
    return {"puzzles": {str(puzzle.number): cost_of(puzzle, seeds) for puzzle in puzzles}}
