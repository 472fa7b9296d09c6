"""What is a check? What it watches beside the script, and how it judges.

A module of this folder holds all of one check, with the sentences that it may say. It has the name
of its row, and ends with its CHECK.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from prove.checks.mistake import Mistake
from prove.judge.loader_passes import share_one_data_set, trained_loader_passes
from prove.judge.rank_steps import StepOfRanks, steps_of
from prove.judge.reasons import Reason
from prove.judge.table import ReportRow
from prove.rank_record import Flag, LoaderPass, RankRecord, RunOutcome
from prove.watch.rank_run import RankRun


class Phase(IntEnum):
    """How far the run of all ranks must have come before a check can judge it."""

    ANY_RUN = 0  # any run, even one that hangs or fails
    ALL_RECORDS = 1  # each rank has written a record
    STEPS = 2  # all ranks came to their ends, and made steps
    ONE_MODEL = 3  # these steps train one model, which each rank holds as a whole


class CheckContext:
    """The run of all ranks, with the rows of the checks that were asked so far."""

    def __init__(self, outcome: RunOutcome) -> None:
        self.outcome = outcome
        self.judged: dict[Check, list[ReportRow]] = {}

    @property
    def records(self) -> list[RankRecord]:
        return self.outcome.records

    @property
    def is_alone(self) -> bool:
        return len(self.records) < 2 and not self.outcome.hang

    @cached_property
    def epochs(self) -> list[list[LoaderPass]]:
        """List the training passes of all ranks; none if each rank may have its own data set."""
        return trained_loader_passes(self.records) if share_one_data_set(self.records) else []

    @cached_property
    def steps(self) -> list[StepOfRanks]:
        return steps_of(self.records)

    def model_is_divided(self) -> bool:
        """Do the ranks hold different parts of the model, as ZeRO divides it, or work in groups?"""
        if {Flag.HAS_GROUPS, Flag.MODEL_IS_DIVIDED} & self.records[0].flags.keys():
            return True
        tensors = [{len(of_rank.weights_before) for of_rank in step.steps} for step in self.steps]
        return any(len(counts) > 1 for counts in tensors)

    def rows_of(self, check: "Check") -> list[ReportRow]:
        """Return the rows of a check, which judges only once, when it is first asked."""
        if check not in self.judged:
            self.judged[check] = check.judge(self)
        return self.judged[check]

    def verdicts(self, check: "Check") -> list[str]:
        return [row.verdict for row in self.rows_of(check)]


@dataclass(frozen=True)
class Check:
    """Holds all of one check; a module may have two of one name, for different phases."""

    name: str  # as the table prints it
    judge: Callable[[CheckContext], list[ReportRow]]
    phase: Phase
    watch: Callable[[RankRun], None] | None = None  # runs in each rank, beside the script
    moot_if_proven: frozenset[Reason] = frozenset()  # dropped when the replay proves equality
    planted: tuple[Mistake, ...] = ()  # test cases, each with the verdict to give
