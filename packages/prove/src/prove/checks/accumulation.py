"""Do the gradients of several backwards add up to one step, though no loss was divided?"""

from typing import NamedTuple

from torch import Tensor

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import accumulate
from prove.judge.reasons import Reason
from prove.judge.table import WARNING, ReportRow, warning
from prove.watch.rank_run import RankRun, source_line

NAME = "accumulation"
MAX_BACKWARDS = 64  # further calls are not recorded


class Sentence(Reason):
    LOSS_NOT_DIVIDED = (
        "{backwards} backwards at {at} add up, and the loss is not divided",
        "loss / {backwards}; meant so only if the loss is a sum, or the rate is divided",
    )


class FirstBackward(NamedTuple):
    """A call of backward on one rank before the first step."""

    source_line: str
    is_scaled: bool
    adds_up: bool  # gradients of an earlier backward were still there


def watch(run: RankRun) -> None:
    calls = run.record.notes(FirstBackward)

    def note(loss: Tensor) -> None:
        if run.record.step_count == 0 and len(calls) < MAX_BACKWARDS:
            adds_up = run.models.holds_gradients()
            calls.append(FirstBackward(source_line(), is_scaled(loss), adds_up))

    run.events.backwards.append(note)


def is_scaled(loss: Tensor) -> bool:
    """Is the loss divided or multiplied in one of its last operations?"""
    node = loss.grad_fn
    for _ in range(4):
        if node is None:
            break
        if "Div" in node.name() or "Mul" in node.name():
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def judge(context: CheckContext) -> list[ReportRow]:
    """Warn if several backwards of one line come before the first step, all undivided."""
    first = context.records[0]
    backwards = first.notes(FirstBackward)
    places = {backward.source_line for backward in backwards}
    n = min(len(backwards), 1 + sum(backward.adds_up for backward in backwards))
    if n < 2 or len(places) > 1 or len(first.optimizers) != 1:
        return []
    if any(backward.is_scaled for backward in backwards):
        return []
    return [warning(NAME, Sentence.LOSS_NOT_DIVIDED, backwards=n, at=places.pop())]


PLANTED = (
    accumulate(
        "accumulation is not divided", WARNING, NAME,
        (
            "                        ignore_index=PADDING,\n"
            '                        reduction="sum",\n',
            "",
        ),
        ("(loss * world_size / words).backward()", "loss.backward()"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.STEPS, watch, planted=PLANTED)
