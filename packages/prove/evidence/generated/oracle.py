"""Check a generated script: one process with the samples of both ranks must get the same weights.

Script and reference differ in their data lines only: the reference makes the loaders of both ranks
and joins their samples, one of rank 0, one of rank 1, and so on. They are compared after all steps
of all epochs. The control is the script whose loss is divided by a local count: it must end
elsewhere. The oracle does not use prove.
"""

from dataclasses import replace

from evidence.case import Counted
from evidence.generated.mistakes import MISTAKES
from evidence.generated.same_rows import same_rows
from evidence.generated.script import Script, generate
from evidence.traces import RANKS, FailedError, Start, Trace, distance, traces

LIMIT = 1e-7  # relative to the weights' way from first to last: rounding, after up to 12 steps
DIFFERS = 1e-4  # a larger difference is more than rounding
DIVERGED = "the ranks end with different weights"


def traces_of(script: Script, world: int) -> list[Trace]:
    arguments = ("--world-size", str(world)) if "--world-size" in script.command else ()
    return traces(script.text, Start(world, arguments, same_rows))


def weights_of_one_process(seed: int) -> Trace:
    [one] = traces_of(generate(seed, is_reference=True), 1)
    return one


def weights_of_ranks(script: Script) -> Trace:
    """Return the trace of rank 0. Raises FailedError also if the weights of ranks differ."""
    first, *others = traces_of(script, RANKS)
    for other in others:
        if not distance(replace(first, last=first.last[: len(other.last)]), other) <= LIMIT:
            raise FailedError(DIVERGED)
    return first


def printed_numbers(trace: Trace) -> list[float]:
    lines = [line for line in trace.printed.splitlines() if line.startswith("epoch ")]
    return [float(word) for line in lines for word in line.split()[1::2]]


def same_numbers(numbers: list[float], others: list[float]) -> bool:
    """Are these numbers equal when printed with four decimals?"""
    pairs = list(zip(numbers, others, strict=False))
    return len(numbers) == len(others) and all(abs(own - other) < 2e-4 for own, other in pairs)


def compare(seed: int) -> Counted:
    facts: dict = {}
    try:
        one = weights_of_one_process(seed)
        ranks = weights_of_ranks(generate(seed))
        control = generate(seed, change=MISTAKES["local divisor"])
        with_fault = distance(weights_of_ranks(control), one)
    except FailedError as error:
        return Counted("not right", False, facts=facts | {"error": str(error)[-1500:]})
    apart = distance(ranks, one)
    facts |= {"apart": apart, "apart with a fault": with_fault}
    is_right = apart <= LIMIT < DIFFERS < with_fault
    if not same_numbers(printed_numbers(ranks), printed_numbers(one)):
        is_right = False
        facts["error"] = f"prints {ranks.printed}, and {one.printed} as one process"
    return Counted("right" if is_right else "not right", is_right, facts=facts)
