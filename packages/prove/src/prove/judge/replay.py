"""A replay that has ended, and the run of all ranks that it replays: what can be compared in them.

`of_ranks` is what all ranks have, `of_one` what one rank has.
"""

import warnings
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from prove.comparable import NotComparableError, comparable
from prove.judge.ends import error_of
from prove.rank_record import (
    Draw,
    DrawKey,
    Ended,
    Finding,
    Mode,
    OneDraw,
    OptimizerStep,
    RankRecord,
    RunOutcome,
    gradients_file,
    tensors_file,
)


class Precision(Enum):
    """The precision in which the script was run."""

    FLOAT64 = "made wider by prove"
    AS_ASKED = "its own, by --float32"
    AS_FAILED = "its own, because it does not run in float64"


class Gradients(NamedTuple):
    """Holds the gradients of one parameter at the first step."""

    parameter: int
    of_ranks: Tensor  # (n,) real numbers: see `comparable`
    of_one: Tensor
    shapes: tuple[torch.Size, torch.Size]  # as the script has them
    dtypes: tuple[torch.dtype, torch.dtype]


def load_gradients(file: Path) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it checks sparse tensors
        return dict(torch.load(file, weights_only=True))


class Replay:
    """Holds what both runs of a comparison wrote: that of all ranks and that of one."""

    def __init__(
        self,
        observed: RunOutcome,
        outcome: RunOutcome,
        folder: str,
        names: tuple[str, str],
        precision: Precision,
    ) -> None:
        """Read both runs; names: that of the run of all ranks, and that of the replay."""
        self.name, self.precision = names[1], precision
        self.is_of_original = names[1] == Mode.ORIGINAL
        self.records = observed.records
        self.observed = observed.records[0]
        self.error = error_of(outcome) if outcome.status else ""
        self.wrote_record = bool(outcome.records)
        self.replayed = outcome.records[0] if outcome.records else RankRecord()
        self.stepped = self.replayed.steps > 0 and self.replayed.ended != Ended.NOT_YET
        of_ranks, of_one = (gradients_file(folder, name, 0) for name in names)
        self.gradients_of_ranks = load_gradients(of_ranks)
        self.gradients_of_one: dict = {}
        self.coins: dict[DrawKey, Draw] = {}  # what the ranks have decided differently
        self.rows: dict[DrawKey, OneDraw] = {}  # what each sample had for itself
        if self.stepped:
            self.gradients_of_one = load_gradients(of_one)
            tensors = torch.load(tensors_file(folder, names[1], 0), weights_only=False)
            self.coins, self.rows = tensors["coins"], tensors["rows"]

    def steps(self, number: int) -> list[tuple[OptimizerStep, OptimizerStep]]:
        """Pair the steps of an optimizer: those of all ranks with those of one rank."""
        runs = self.observed, self.replayed
        if any(number >= len(run.optimizers) for run in runs):
            return []
        return list(zip(*(run.optimizers[number].steps for run in runs), strict=False))

    def own_steps(self, number: int) -> list[tuple[OptimizerStep, ...]]:
        """List the steps of an optimizer, each as every rank has made it."""
        records = [rank for rank in self.records if number < len(rank.optimizers)]
        return list(zip(*(rank.optimizers[number].steps for rank in records), strict=False))

    def gradients(self, number: int) -> list[Gradients]:
        """Read the gradients of the first step of an optimizer."""
        both = (self.gradients_of_ranks, self.gradients_of_one)
        tensors = zip(*(gradients.get(number, []) for gradients in both), strict=False)
        pairs = []
        for parameter, (of_ranks, of_one) in enumerate(tensors):
            if of_ranks is None or of_one is None:
                continue
            with suppress(NotComparableError):  # its kind stands in the record
                shapes, dtypes = (of_ranks.shape, of_one.shape), (of_ranks.dtype, of_one.dtype)
                flat = comparable(of_ranks), comparable(of_one)
                pairs.append(Gradients(parameter, *flat, shapes, dtypes))
        return pairs

    def takes_more_batches(self) -> bool:
        """Does one rank take the batches of several steps for one, as accumulation was divided?"""
        if not self.stepped:
            return self.wrote_record and not self.replayed.steps and not self.replayed.error
        of_ranks, of_one = (
            [optimizer.steps[0].batch for optimizer in run.optimizers if optimizer.steps]
            for run in (self.observed, self.replayed)
        )
        backwards, backwards_of_one = (
            sum(backward.steps_before == 0 for backward in run.backwards)
            for run in (self.observed, self.replayed)
        )
        later = bool(of_ranks and of_one) and of_one[0] > of_ranks[0]
        return later or backwards_of_one >= backwards * len(self.records) > 0

    def places_of_draws(self, finding: Finding) -> list[str]:
        """List the places of draws of which this was found, in any of the runs."""
        records = [*self.records, self.replayed]
        places = [place for record in records for place in record.draws.get(finding, [])]
        return list(dict.fromkeys(places))
