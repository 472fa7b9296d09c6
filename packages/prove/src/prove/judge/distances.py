"""How far apart are two lists of numbers, or of weights and gradients, known by their projections?

model_tensors.project makes these.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from prove.judge.rank_steps import differ
from prove.rank_record import OptimizerStep, Projection

Projections = Sequence[Projection | None]


def distance(projections: list, others: list) -> float:
    """Measure the distance between two lists of tensors by their projections."""
    pairs = zip(projections, others, strict=False)
    return float(sum((value - other) ** 2 for (value, _), (other, _) in pairs) ** 0.5)


def relative_error_by_step(states: Sequence[Sequence[list[Projection]]]) -> dict[int, float]:
    """Return the distance of both runs' weights after each step, relative to the step's change.

    Steps that change nothing are left out. `states` holds the weights of all ranks and of one rank
    before each step and after the last one.
    """
    return {
        n: distance(*after) / distance(before[0], after[0])
        for n, (before, after) in enumerate(pairwise(states), start=1)
        if all(map(distance, before, after))
    }


def name_of_largest_error(names: list[str], projections: Projections, others: Projections) -> str:
    """Name the tensor whose projections are farthest apart."""
    pairs = zip(projections, others, strict=False)
    far = [abs(own[0] - other[0]) if own and other else 0.0 for own, other in pairs]
    return names[far.index(max(far))]


def relative_error_of_projections(gradients: list, others: list) -> float:
    """Measure the relative error of two gradients by their projections."""
    pairs = zip(gradients, others, strict=False)
    known = [pair for pair in pairs if None not in pair]
    length = sum(norm**2 for _, (_, norm) in known) ** 0.5
    return distance([own for own, _ in known], [other for _, other in known]) / (length or 1.0)


def numbers_differ(values: list[float], others: list[float], limit: float = 1e-6) -> bool:
    pairs = zip(values, others, strict=False)
    return any(abs(value - other) > limit * (abs(value) + abs(other)) for value, other in pairs)


def are_finite(projections: list[Projection]) -> bool:
    return all(math.isfinite(value) for value, _ in projections)


def weights_are_finite(pair: tuple[OptimizerStep, OptimizerStep]) -> bool:
    return all(are_finite(step.weights_after) for step in pair)


def has_gradient(step: OptimizerStep) -> bool:
    """Does this step have a gradient that is not zero?"""
    return any(gradient and gradient[1] != 0 for gradient in step.gradients)


def weights_differ(ranks_weights: list[list[Projection]]) -> bool:
    """Do any of these weights differ between the ranks?"""
    return any(differ(held) for held in zip(*ranks_weights, strict=False))


def factor_of_moments(pair: tuple[OptimizerStep, OptimizerStep]) -> float | None:
    """Find the factor between the gradient that step() averaged and that of one rank.

    Adam's weights hide such a factor, but its moments show it. Returns None if there is no factor,
    or not the same one for all parameters.
    """
    for name in sorted({name for moments in pair[0].moments for name in moments}):  # exp_avg first
        both = [
            (own[name], one[name])
            for own, one in zip(pair[0].moments, pair[1].moments, strict=False)
            if name in own and name in one and one[name][1] > 0
        ]
        factors = sorted(own[1] / one[1] for own, one in both)
        if not factors or factors[-1] - factors[0] > 1e-3 * factors[-1]:
            continue
        is_linear = all(abs(own[0] - factors[0] * one[0]) <= 1e-3 * own[1] for own, one in both)
        if is_linear and abs(factors[0] - 1) > 1e-3:
            return factors[0]
    return None
