"""What does each mistake of the puzzles cost? Both scripts run with several seeds."""

from typing import Any

import judge_answer
from benchmarks.measure.sections import section
from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results

SEEDS = 10


def cost_of(puzzle: Any, seeds: int) -> Results:
    """Run a puzzle with and without its mistake, on two ranks, in the script's own precision."""
    runs: Results = {"with": [], "without": []}
    for kind, source in (("with", puzzle.story.script), ("without", puzzle.story.cure)):
        for seed in range(seeds):
            trace = judge_answer.run(source, 2, in_float64=False, seed=seed)[0]
            runs[kind].append(round(float(trace.result), 6))
    answer = judge_answer.prove_answer(puzzle.story.script)
    for verdict in (judge_answer.WRONG, judge_answer.WARNING):
        runs[verdict] = sorted({*answer.checks(verdict)})
    print(puzzle.name, puzzle.style, flush=True)
    return runs


@section("puzzles")
def measure_puzzles(effort: Effort) -> Results:
    known = judge_answer.MISTAKES
    seeds, puzzles = (1, known[:1]) if effort.quick else (SEEDS, known)
    return {"puzzles": {puzzle.name: cost_of(puzzle, seeds) for puzzle in puzzles}}
