"""What is a check? Its sentences, what it watches beside the script, and how it judges.

A module of this folder holds all of one check and ends with its CHECK; __init__.py has their order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import cached_property

from prove.checks.mistake import Mistake
from prove.judge.loader_passes import share_one_data_set, trained_loader_passes
from prove.judge.reasons import Reason
from prove.judge.steps import StepOfRanks, model_is_divided, steps_of
from prove.judge.table import ReportRow
from prove.rank_record import LoaderPass, RankRecord, RunOutcome
from prove.watch.rank_run import RankRun


class Phase(IntEnum):
    """How far the run of all ranks must have come before a check can judge it."""

    ANY_RUN = 0  # also one that hangs or fails
    ALL_RECORDS = 1  # each rank has written one
    STEPS = 2  # all ranks came to their ends, and made steps
    ONE_MODEL = 3  # these steps train one model, which each rank holds as a whole


class Seen:
    """The run of all ranks, as a check sees it when it is its turn."""

    def __init__(self, outcome: RunOutcome, rows: list[ReportRow]) -> None:
        """rows: of the table, to which each check adds its own."""
        self.outcome, self.rows = outcome, rows
        self.judged: set[str] = set()  # the names of the checks before this one

    @property
    def records(self) -> list[RankRecord]:
        return self.outcome.records

    @property
    def is_alone(self) -> bool:
        return len(self.records) < 2 and not self.outcome.hang

    @cached_property
    def epochs(self) -> list[list[LoaderPass]]:
        """The training passes of all ranks; none where each rank may train on what it likes."""
        return trained_loader_passes(self.records) if share_one_data_set(self.records) else []

    @cached_property
    def steps(self) -> list[StepOfRanks]:
        return steps_of(self.records)

    def model_is_divided(self) -> bool:
        """Do the ranks hold different parts of the model, as ZeRO divides it, or work in groups?"""
        tensors = [{len(of_rank.weights_before) for of_rank in step.steps} for step in self.steps]
        return model_is_divided(self.records) or any(len(counts) > 1 for counts in tensors)

    def trains_one_model(self) -> bool:
        """Do all ranks train one model, which each of them holds as a whole?"""
        if len(self.records) == 1 or self.verdicts("zero gradients"):
            return False
        return not self.model_is_divided()

    def verdicts(self, check: str) -> list[str]:
        """What an earlier check has said. LookupError: there is none of this name."""
        if check not in self.judged:
            raise LookupError(f"{check} is no check before this one: see the order of the checks")
        return [row.verdict for row in self.rows if row.check == check]


@dataclass(frozen=True)
class Check:
    """Holds all of one check; a module may have two of one name, for different stages."""

    name: str  # as the table prints it
    says: type[Reason]
    judge: Callable[[Seen], list[ReportRow]]
    stage: Phase
    watch: Callable[[RankRun], None] | None = None  # runs in each rank, beside the script
    moot_if_proven: frozenset[Reason] = frozenset()  # not said if one rank computes the same
    planted: tuple[Mistake, ...] = ()  # the check must find them, or not call them WRONG

    def __post_init__(self) -> None:
        unique(self.says)  # of two sentences alike, the second would be lost
