"""Hold a finished replay beside the run of all ranks, and pair what can be compared.

Names begin with `ranks_` for values of all ranks, and with `one_` for values of the one rank.
"""

import warnings
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from prove.comparable import NotComparableError, comparable
from prove.judge.rank_exits import error_of
from prove.judge.table import ReplayCheck
from prove.rank_record import (
    Draw,
    DrawFinding,
    DrawKey,
    Ended,
    Mode,
    OneDraw,
    OptimizerStep,
    RankFile,
    RankRecord,
    RunOutcome,
)


class Precision(Enum):
    """The precision in which the script was run."""

    FLOAT64 = "made wider by prove"
    AS_ASKED = "its own, by --float32"
    AS_FAILED = "its own, because it does not run in float64"


class Gradients(NamedTuple):
    """Holds the gradients of one parameter at the first step."""

    parameter: int
    ranks_gradient: Tensor  # (n,) real numbers: see `comparable`
    one_gradient: Tensor
    shapes: tuple[torch.Size, torch.Size]  # as the script has them
    dtypes: tuple[torch.dtype, torch.dtype]


def load_gradients(file: Path) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it checks sparse tensors
        return dict(torch.load(file, weights_only=True))


class Replay:
    """Holds the records of both runs of a comparison: of all ranks, and of one rank."""

    def __init__(
        self,
        observed_outcome: RunOutcome,
        replay_outcome: RunOutcome,
        folder: str,
        names: tuple[str, str],
        precision: Precision,
    ) -> None:
        """Read both runs; `names` are those of the run of all ranks and of the replay."""
        self.name, self.precision = names[1], precision
        self.check = ReplayCheck.ORIGINAL if self.name == Mode.ORIGINAL else ReplayCheck.ONE_RANK
        self.records = observed_outcome.records
        self.rank_0_record = observed_outcome.records[0]
        self.error = error_of(replay_outcome) if replay_outcome.status else ""
        self.wrote_record = bool(replay_outcome.records)
        self.one_rank_record = replay_outcome.records[0] if replay_outcome.records else RankRecord()
        self.stepped = (
            self.one_rank_record.step_count > 0 and self.one_rank_record.ended != Ended.NOT_YET
        )
        ranks_file, one_file = (RankFile.GRADIENTS.of(folder, name, 0) for name in names)
        self.ranks_gradients = load_gradients(ranks_file)
        self.one_gradients: dict = {}
        self.batch_decisions: dict[DrawKey, Draw] = {}  # decisions that differ between the ranks
        self.per_sample_draws: dict[DrawKey, OneDraw] = {}  # draws that differ by sample
        if self.stepped:
            self.one_gradients = load_gradients(one_file)
            tensors = torch.load(RankFile.TENSORS.of(folder, names[1], 0), weights_only=False)
            self.batch_decisions = tensors["batch_decisions"]
            self.per_sample_draws = tensors["per_sample_draws"]

    def steps(self, optimizer_index: int) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """Pair the steps of an optimizer: those of all ranks with those of one rank."""
        runs = self.rank_0_record, self.one_rank_record
        if any(optimizer_index >= len(run.optimizers) for run in runs):
            return []
        return list(zip(*(run.optimizers[optimizer_index].steps for run in runs), strict=False))

    def own_steps(self, optimizer_index: int) -> list[tuple[OptimizerStep, ...]]:
        """List the steps of an optimizer, each as every rank has made it."""
        records = [rank for rank in self.records if optimizer_index < len(rank.optimizers)]
        return list(
            zip(*(rank.optimizers[optimizer_index].steps for rank in records), strict=False)
        )

    def gradients(self, optimizer_index: int) -> list[Gradients]:
        """Read the gradients of the first step of an optimizer."""
        both = (self.ranks_gradients, self.one_gradients)
        tensors = zip(*(gradients.get(optimizer_index, []) for gradients in both), strict=False)
        pairs = []
        for parameter, (ranks_gradient, one_gradient) in enumerate(tensors):
            if ranks_gradient is None or one_gradient is None:
                continue
            with suppress(NotComparableError):  # the record names such a kind
                shapes, dtypes = (
                    (ranks_gradient.shape, one_gradient.shape),
                    (ranks_gradient.dtype, one_gradient.dtype),
                )
                flat = comparable(ranks_gradient), comparable(one_gradient)
                pairs.append(Gradients(parameter, *flat, shapes, dtypes))
        return pairs

    def takes_more_batches(self) -> bool:
        """Does one rank take more batches per step, because the script divided accumulation?"""
        if not self.stepped:
            return (
                self.wrote_record
                and not self.one_rank_record.step_count
                and not self.one_rank_record.error
            )
        ranks_batches, one_batches = (
            [optimizer.steps[0].batch for optimizer in run.optimizers if optimizer.steps]
            for run in (self.rank_0_record, self.one_rank_record)
        )
        backwards, backwards_of_one = (
            sum(backward.steps_before == 0 for backward in run.backwards)
            for run in (self.rank_0_record, self.one_rank_record)
        )
        later = bool(ranks_batches and one_batches) and one_batches[0] > ranks_batches[0]
        return later or backwards_of_one >= backwards * len(self.records) > 0

    def source_lines_of_draws(self, finding: DrawFinding) -> list[str]:
        """List the lines of draws with this finding, from both runs."""
        records = [*self.records, self.one_rank_record]
        places = [place for record in records for place in record.draws.get(finding, [])]
        return list(dict.fromkeys(places))
