"""Let prove judge generated scripts, right ones and the same scripts with a mistake.

A mistake counts only if it changes the weights: in float64 they must differ from those of one
process with the samples of both ranks (oracle.py, which does not use prove). Status 0 without a
warning is then a false right, the worst that prove can do.
"""

import sys

from evidence.case import Case, Counted, judge, run_case
from evidence.generated.mistakes import MISTAKES, plantable
from evidence.generated.oracle import DIFFERS, DIVERGED, weights_of_one_process, weights_of_ranks
from evidence.generated.parts import Change
from evidence.generated.script import Script, generate
from evidence.run_prove import RIGHT, WARNING, WRONG
from evidence.traces import FailedError, distance


def case_of(script: Script, verdict: str = RIGHT) -> Case:
    options = ["--timeout=60"]
    if script.alone:
        options.append(f"--alone={script.alone.replace('python', sys.executable)}")
    command = tuple(script.command)
    return Case(str(script.seed), script.text, verdict, command=command, options=tuple(options))


def judge_right(seed: int) -> Counted:
    return judge(case_of(generate(seed)))


def changed_weights(seed: int, change: Change) -> float | None:
    """Measure how far the weights end from those of one process; None if ranks differ."""
    one = weights_of_one_process(seed)
    try:
        return distance(weights_of_ranks(generate(seed, change=change)), one)
    except FailedError as error:
        if str(error) == DIVERGED:
            return None
        raise


def judge_broken(seed: int, mistake: str = "") -> Counted:
    """Let prove judge this mistake, or the first one that changes the weights."""
    changes = {mistake: MISTAKES[mistake]} if mistake else plantable(seed)
    not_counted: dict[str, str] = {}
    facts: dict = {"not counted": not_counted}
    for name, change in changes.items():
        try:
            apart = changed_weights(seed, change)
        except FailedError as error:
            not_counted[name] = f"does not run: {str(error)[-300:]}"
            continue
        if apart is None or apart > DIFFERS:
            weights = "differ between the ranks" if apart is None else apart
            facts |= {"kind": name, "weights": weights}
            return search_false_right(generate(seed, change=change), facts)
        not_counted[name] = f"the weights end {apart:.1e} away"
    return Counted("no mistake", True, facts=facts)


def search_false_right(script: Script, facts: dict) -> Counted:
    case = case_of(script, WRONG)
    answer = run_case(case, case.script)
    outcome = "no table" if answer.error else "not seen"
    if not answer.error:
        for verdict in (WARNING, WRONG):
            outcome = verdict if answer.checks(verdict) else outcome
        if outcome == "not seen" and answer.is_proven:
            outcome = "false right"
    return Counted(outcome, outcome != "false right", {"script": answer}, facts)
