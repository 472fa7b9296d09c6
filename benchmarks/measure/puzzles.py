"""What does each mistake of the puzzles cost? Both scripts run with several seeds."""

from typing import Any

from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results
from common.chapters import load_program

check_answer = load_program("beyond/puzzles", "check_answer")

SEEDS = 10


def cost_of(puzzle: Any, seeds: int) -> Results:
    """On two ranks, in the precision that the script has."""
    runs: Results = {"with": [], "without": []}
    for kind, source in (("with", puzzle.story.script), ("without", puzzle.story.cure)):
        for seed in range(seeds):
            trace = check_answer.run(source, 2, in_float64=False, seed=seed)[0]
            runs[kind].append(round(float(trace.result), 6))
    answer = check_answer.prove_answer(puzzle.story.script)
    for verdict in (check_answer.WRONG, check_answer.WARNING):
        runs[verdict] = sorted({*answer.checks(verdict)})
    print(puzzle.number, puzzle.style, flush=True)
    return runs


def measure_puzzles(effort: Effort) -> Results:
    known = check_answer.PUZZLES
    seeds, puzzles = (1, known[:1]) if effort.quick else (SEEDS, known)
    return {"puzzles": {str(puzzle.number): cost_of(puzzle, seeds) for puzzle in puzzles}}
