"""Put the same step, tensor or number of all ranks side by side: do they differ?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prove.rank_record import OptimizerRecord, OptimizerStep, Projection, RankRecord

TINY = 1e-12
MAX_SPREAD_OF_MEAN = 1e-4  # ranks whose gradients differ by more have not averaged them


@dataclass
class StepOfRanks:
    """Holds one step of an optimizer, as each of the ranks wrote it down."""

    optimizer: OptimizerRecord
    step_number: int
    steps: list[OptimizerStep]
    exchange_precision: float  # spacing near 1 of the numbers that the ranks send

    def by_parameter(self, held: Callable[[OptimizerStep], list]) -> list[tuple]:
        """List for each parameter what the ranks hold of it, such as its gradients."""
        return list(zip(*map(held, self.steps), strict=True))

    @property
    def source_line(self) -> str:
        return self.steps[0].source_line


def differ(projections: Sequence[Projection], limit: float = 1e-5) -> bool:
    """Do these projections differ, though they should be of the same tensor?"""
    values, norms = zip(*projections, strict=True)
    if not all(map(math.isfinite, norms)):
        return any(map(math.isfinite, norms))
    return bool(max(values) - min(values) > limit * max(TINY, *norms))


def names_apart(by_rank: list[dict[str, Projection]]) -> tuple[list[str], list[str]]:
    """Return the names of the tensors that all ranks hold, and of those that differ."""
    common = [name for name in by_rank[0] if all(name in own for own in by_rank)]
    return common, [name for name in common if differ([own[name] for own in by_rank])]


def parameter_names(optimizer: OptimizerRecord, numbers: list[int]) -> list[str]:
    return [optimizer.names[index] for index in numbers]


def steps_of(records: list[RankRecord]) -> list[StepOfRanks]:
    steps = []
    for optimizers in zip(*(rank.optimizers for rank in records), strict=False):
        if any(optimizer.keys != optimizers[0].keys for optimizer in optimizers):
            continue  # each rank holds only the parameters that it owns
        ranks_steps = zip(*(optimizer.steps for optimizer in optimizers), strict=False)
        for step_number, of_each in enumerate(ranks_steps, start=1):
            if all(step.weights_after for step in of_each):
                sent = records[0].exchange_precision
                steps.append(StepOfRanks(optimizers[0], step_number, list(of_each), sent))
    return steps


def steps_with_old_gradients(steps: list[StepOfRanks]) -> list[StepOfRanks]:
    """Return the steps with an old gradient on all ranks, if there are several."""
    old = [
        step
        for step in steps
        if step.step_number > 1 and all(of_rank.has_old_gradient for of_rank in step.steps)
    ]
    return old if len(old) > 1 else []


def differing_statistic(records: list[RankRecord]) -> dict[str, Any] | None:
    """Find the first statistic over each rank's samples that differs between the ranks."""
    numbers = [{each.tag: each.value for each in rank.statistics} for rank in records]
    for each in records[0].statistics:
        values = [own[each.tag] for own in numbers if each.tag in own]
        if len(values) == len(records) and max(values) - min(values) > 1e-6 * max(map(abs, values)):
            return {"name": each.name, "at": each.source_line, "values": values}
    return None
