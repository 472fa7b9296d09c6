"""The puzzles, and their judge: twelve scripts with a mistake, and four with a gap.

An answer is right if two ranks compute what one rank computed before the change, in float64, if one
rank alone still computes it too, and if prove has nothing to say. (Where a puzzle leaves open in
which order the ranks take the samples, the two ranks must share those of one.) Nothing compares
your text with the answer.
"""

import ast
import difflib
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from local_ranks.chapters import ROOT

sys.path.append(str(ROOT / "packages" / "prove"))

from evidence.reported import Story, stories
from evidence.run_prove import NOT_SEEN, PROOF, WARNING, WRONG, Answer, run_prove
from evidence.traces import FailedError, Start, Trace, traces

GAPS = Path(__file__).parent / "gaps"
COST = ROOT / "benchmarks" / "results" / "puzzles.json"
EQUAL = 1e-9  # relative to the weights, in float64: the mistakes change a step by 1e-5 or more
FP16 = "torch.float16"
NEAR = 0.1  # in 16 bits, relative to the last number in float64
MOST_LINES = 16  # the answer to a mistake adds and removes at most so many


class Puzzle(NamedTuple):
    """A script with a mistake that somebody reported or with a gap, and what the reader is told."""

    story: Story
    number: int
    style: str
    belongs_to: str  # the page that teaches what one must know
    rows: tuple[str, ...] = ()  # rows of prove, which the answer turns right
    why_unseen: str = ""  # if no row says WRONG
    measure: str = ""  # what main() returns
    ranks_draw_apart: bool = False  # two ranks draw other random numbers than one
    order_is_free: bool = False  # two ranks may take the samples in another order than one
    if_apart: str = ""  # a question to those whose ranks do not train one model
    if_changed: str = ""  # to those whose one rank no longer does
    if_fails: str = ""  # to those whose script fails
    any_order: bool = False  # even one rank may, but in another one in each epoch
    in_16_bits: bool = False  # its own precision must lead to the number of float64, too
    counts_messages: bool = False
    wrapper: str = ""  # the class of the module that must be called

    @property
    def is_gap(self) -> bool:
        return self.story.set == "gaps"

    @property
    def name(self) -> str:
        """Return what the reader types."""
        return f"gap{self.number}" if self.is_gap else str(self.number)

    @property
    def folder(self) -> str:
        return self.name if self.is_gap else f"{self.number:02}"

    @property
    def purpose(self) -> str:
        return ast.get_docstring(ast.parse(self.story.script)) or ""


def in_order(found: list[Story]) -> list[Puzzle]:
    return sorted((Puzzle(each, **each.puzzle) for each in found), key=lambda each: each.number)


MISTAKES = in_order(stories("puzzles"))
PUZZLES = {puzzle.name: puzzle for puzzle in [*in_order(stories("gaps", home=GAPS)), *MISTAKES]}


class Verdict(NamedTuple):
    is_right: bool
    text: str


class ScriptError(Exception):
    """The script fails; the text is one line."""


# Run it


def prove_answer(source: str) -> Answer:
    answer = run_prove(source)
    if answer.error:
        raise ScriptError(answer.error)
    return answer


def run(source: str, ranks: int, in_float64: bool = True, seed: int = 0) -> list[Trace]:
    """Trace each rank. Raises ScriptError if the script fails or its ranks wait for each other."""
    start = Start(ranks, in_float64=in_float64, seed=1000 * seed, as_program=False)
    try:
        of_ranks = traces(source, start)
    except FailedError as error:
        lines = re.findall(r'"train\.py", line (\d+)', str(error))
        where = f"line {lines[-1]}: " if lines else ""
        raise ScriptError(f"{where}{error.line}") from None
    if not all(isinstance(trace.result, int | float) for trace in of_ranks):
        raise ScriptError("main() has to stay, and to return the number that it prints last")
    return of_ranks


@cache
def reference(source: str) -> Trace:
    """One process in float64, before any change: it averages nothing, so it has no mistake."""
    return run(source, ranks=1)[0]


def cost(puzzle: Puzzle) -> str:
    """What the mistake cost in the runs that were measured, on average."""
    runs = json.loads(COST.read_text())["puzzles"][puzzle.name]
    text = f"{puzzle.measure} {mean(runs['with']):.3f} with it, {mean(runs['without']):.3f} without"
    return f"{text} (mean of {len(runs['with'])} seeds)"


# Judge it


def changed_lines(before: str, after: str) -> int:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return sum(line[0] in "+-" for line in list(lines)[2:])


def judge(puzzle: Puzzle, source: str) -> Verdict:
    """Is this script what the puzzle's should have been?"""
    changed = changed_lines(puzzle.story.script, source)
    if changed > MOST_LINES and not puzzle.is_gap:
        return Verdict(False, f"{changed} lines are changed, and {MOST_LINES} are enough")
    try:
        one, ranks = run(source, ranks=1)[0], run(source, ranks=2)
        text = judge_one_rank(puzzle, one) or compare_ranks(puzzle, one, *ranks)
        if not text and puzzle.wrapper not in ("", ranks[0].module):
            text = f"right, but {ranks[0].module} is called, and this one is about {puzzle.wrapper}"
        if not text and puzzle.in_16_bits:
            text = judge_precision(source, one)
        if not text and (said := objections(puzzle, source)):
            text = f"prove still objects to: {', '.join(said)} (see HINT=1)"
    except ScriptError as error:
        return Verdict(False, question(f"the script fails: {error}", puzzle.if_fails))
    if text:
        return Verdict(False, text)
    text = puzzle.story.mistake or "two ranks compute what one rank computes."
    return Verdict(True, text + in_messages(puzzle, ranks[0]))


def judge_one_rank(puzzle: Puzzle, one: Trace) -> str:
    """What one rank alone computes else than before the change; nothing if it is the same."""
    right = reference(puzzle.story.script)
    if puzzle.any_order:
        return differing_epochs([one], right, "one rank alone takes")
    if text := difference(one, right):
        text = f"one rank alone no longer computes what it did: {text}"
        if puzzle.ranks_draw_apart:
            more = (
                "Other noise may be right elsewhere, but here rank 0 must draw what one rank draws"
            )
            return f"{text}. {more}"
        lengths = in_lengths(one, right, ON_ONE_RANK) if puzzle.is_gap else ""
        return question(text, puzzle.if_changed or lengths)
    return ""


def compare_ranks(puzzle: Puzzle, one: Trace, first: Trace, second: Trace) -> str:
    """What two ranks compute else than one rank of the same script; nothing if they agree."""
    if text := difference(replace(second, result=first.result), first):
        text = f"the two ranks do not train one model: {text}"
        if puzzle.counts_messages:
            text = f"{text}. In it, a rank sent {messages(first.messages[0])}"
        is_silent = puzzle.counts_messages and not first.messages[0]
        return question(text, "" if is_silent else puzzle.if_apart)
    if puzzle.any_order:
        ranks = [first, second]
        return differing_epochs(ranks, one, "each of two ranks takes") or same_order(ranks, one)
    if puzzle.order_is_free and (text := dealt_differently([first, second], one)):
        return f"the two ranks do not share the samples of one: {text}"
    draws = [*first.draws, *second.draws]
    if puzzle.ranks_draw_apart and (again := len(draws) - len({*draws})):
        return f"in {again} of {len(draws)} steps of the ranks, the noise has been drawn before"
    if puzzle.order_is_free or puzzle.ranks_draw_apart:
        return ""
    if text := difference(first, one):
        lengths = in_lengths(first, one, ON_TWO_RANKS) if puzzle.is_gap else ""
        return question(f"two ranks do not compute what one rank computes: {text}", lengths)
    return ""


def question(text: str, more: str) -> str:
    """The text, and what leads on from it, if there is something."""
    return f"{text}. {more}" if more else text


def messages(number: int) -> str:
    return f"{number or 'no'} message{'s' * (number != 1)}"


def judge_precision(source: str, one: Trace) -> str:
    """How the last number of two ranks in 16 bits differs from float64; nothing if it is near."""
    trace = run(source, ranks=2, in_float64=False)[0]
    if trace.autocast != FP16:
        return f"forward computes in {trace.autocast or 'fp32'}, and the puzzle is about {FP16}"
    if abs(trace.result - one.result) <= NEAR * abs(one.result):
        return ""
    said = f"float64 leads to {one.result:.4g}, but fp16 to {trace.result:.4g}"
    if math.isnan(trace.result):
        return f"{said}: does the step happen even if the gradient overflows?"
    return f"{said}: do its gradients become 0 before they reach the weights?"


def objections(puzzle: Puzzle, source: str) -> list[str]:
    answer = prove_answer(source)
    said = set(answer.checks(WRONG)) | ({PROOF} & set(answer.checks(NOT_SEEN)))
    if puzzle.is_gap:  # no row is named, so each warning counts
        said |= set(answer.checks(WARNING))
    return sorted(said | {check for check in puzzle.rows if check in answer.evidence})


def in_messages(puzzle: Puzzle, rank: Trace) -> str:
    """How many messages the second step took, if the puzzle is about them."""
    if not puzzle.counts_messages:
        return ""
    number = rank.messages[1]
    more = ", as few as can be." if number == 1 else "; can you do it with 1?"
    return f" In each step, a rank sends {messages(number)}{more}"


# Say what differs


def difference(trace: Trace, right: Trace) -> str:
    """What another rank, or another script, computed else; nothing if they agree."""
    if len(trace.weights) != len(right.weights):
        return f"{len(trace.weights)} optimizer steps, expected {len(right.weights)}"
    for step, (mine, expected) in enumerate(zip(trace.weights, right.weights, strict=True), 1):
        if mine.shape != expected.shape:
            return f"{mine.numel()} weights in step {step}, expected {expected.numel()}"
        apart = (mine - expected).norm() / expected.norm()
        if not apart <= EQUAL:  # nan differs, too
            return f"after step {step} of {len(right.weights)}, the weights differ by {apart:.0e}"
    if not abs(trace.result - right.result) <= EQUAL * abs(right.result):
        return f"the last number is {trace.result:.6g}, expected {right.result:.6g}"
    return ""


ON_ONE_RANK = {
    0.0: "No weight moves: is p.grad None? all_reduce returns nothing, it changes its tensor",
    0.5: "Is there a 2 where the number of ranks belongs?",
}
ON_TWO_RANKS = {
    2.0: "a sum in place of the mean, or a quotient that is thrown away?",
    0.5: "divided once more than needed?",
}


def in_lengths(trace: Trace, right: Trace, why: dict[float, str]) -> str:
    """Say it if the first step has the right direction, but another length."""
    if not trace.weights or trace.weights[0].shape != right.weights[0].shape:
        return ""
    before = torch.cat([tensor.flatten() for tensor in right.first])
    mine, expected = trace.weights[0] - before, right.weights[0] - before
    times = round(float(mine @ expected / expected.square().sum()), 6)
    if times == 1 or not (mine - times * expected).norm() <= 1e-5 * expected.norm():
        return ""
    if why is ON_ONE_RANK and times in why:
        return why[times]
    more = f": {why[times]}" if times in why else ""
    return f"The first step is {times:.3g} times as long{more}"


def epochs(trace: Trace, steps: int) -> list[list[str]]:
    """The samples of each epoch, which has so many optimizer steps."""
    count = len(trace.weights) // steps if steps else 0
    size = len(trace.samples) // max(1, count)
    return [trace.samples[start : start + size] for start in range(0, size * count, size or 1)]


def differing_epochs(ranks: list[Trace], right: Trace, who: str) -> str:
    """What is wrong with the samples of some epoch; nothing if all is right."""
    every = Counter({*right.samples})
    steps = len(right.weights) * len(every) // len(right.samples)
    of_ranks = [epochs(rank, steps) for rank in ranks]
    if len(ranks[0].weights) != len(right.weights):
        steps_of = f"{len(ranks[0].weights)} steps, where one process took {len(right.weights)}"
        return f"{who} {steps_of}: does it take the samples that are its own?"
    for number, parts in enumerate(zip(*of_ranks, strict=True)):
        if text := lacking(Counter(sample for part in parts for sample in part), every):
            return f"in epoch {number}, {who} the wrong samples: {text}"
    return ""


def same_order(ranks: list[Trace], right: Trace) -> str:
    """Two epochs in which a rank takes the same samples in the same order; nothing if none do."""
    steps = len(right.weights) * len({*right.samples}) // len(right.samples)
    for rank, trace in enumerate(ranks):
        for number, (part, following) in enumerate(pairwise(epochs(trace, steps))):
            if part == following:
                return f"epochs {number} and {number + 1} have the same order on rank {rank}"
    return ""


def dealt_differently(ranks: list[Trace], one: Trace) -> str:
    """Whether the ranks together take not each sample of one rank once; nothing if they do."""
    if len(ranks[0].weights) != len(one.weights):
        return f"{len(ranks[0].weights)} optimizer steps, expected {len(one.weights)}"
    return lacking(Counter(x for rank in ranks for x in rank.samples), Counter(one.samples))


def lacking(taken: Counter, expected: Counter) -> str:
    if taken == expected:
        return ""
    left_out, again = (expected - taken).total(), (taken - expected).total()
    return f"of {expected.total()} samples, {left_out} are left out, and {again} come again"
