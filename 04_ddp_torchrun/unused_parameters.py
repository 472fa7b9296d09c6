"""A branch that a step does not use: its gradient never comes, and DDP never sends its bucket.

    torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/unused_parameters.py

The model has a stem and two branches of one weight each. Rank r feeds it the number r + 1. A step
should give the mean over the ranks, with zero from a rank that does not use the parameter, and no
gradient at all if no rank uses it.
"""

from math import isclose
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.options import Parser, UsageError, exit_on
from common.ranks import join_on_this_machine

Step = tuple[str, str]  # the branches that the even and the odd ranks take
LEFT, MIXED, RIGHT, BOTH = ("left", "left"), ("left", "right"), ("right", "right"), ("both", "both")
# Forward returns the outputs of both branches, and the loss takes the left one only.
IDLE = ("idle", "idle")
FIND, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
CASES: list[tuple[dict[str, bool], list[Step]]] = [
    ({}, [BOTH, LEFT, LEFT]),
    (FIND, [BOTH, LEFT, MIXED, RIGHT, IDLE]),
    (STATIC, [MIXED, MIXED, MIXED]),  # each rank has a graph of its own, and keeps it
    (STATIC, [LEFT, LEFT, BOTH]),
    (STATIC, [BOTH, BOTH, LEFT, LEFT]),
    (STATIC, [IDLE, IDLE, IDLE]),
]
LINE_FORMAT = "  {:14}{:10}{:10}{:10}{}"


class Branches(nn.Module):
    """Sends x, (1, 1), through the stem, then through one or both branches; weights 1, 2, 3."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(1, 1, bias=False) for _ in range(3))
        for weight, layer in enumerate((self.stem, self.left, self.right), start=1):
            nn.init.constant_(layer.weight, weight)

    def forward(self, x: Tensor, branch: str) -> tuple[Tensor, ...]:
        x = self.stem(x)
        if branch == "left":
            return (self.left(x),)
        if branch == "right":
            return (self.right(x),)
        return self.left(x), self.right(x)


def gradients(model: nn.Module, wrapped: nn.Module, rank: int, branch: str) -> list[float | None]:
    """The gradients of stem, left and right after one forward and backward of a rank."""
    model.zero_grad()
    outputs = wrapped(torch.full((1, 1), rank + 1.0), branch)
    loss = outputs[0] if branch == "idle" else torch.stack(outputs).sum()
    loss.sum().backward()
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def expected_gradients(step: Step, world_size: int) -> list[float | None]:
    """What DDP should give: one process computes each rank's gradients and averages them."""
    model = Branches()
    gradients_of_ranks = [
        gradients(model, model, rank, step[rank % 2]) for rank in range(world_size)
    ]
    return [
        None if all(g is None for g in column) else sum(g or 0.0 for g in column) / world_size
        for column in zip(*gradients_of_ranks, strict=True)  # one parameter's, on each rank
    ]


def gradients_after_steps(
    options: dict[str, Any], steps: list[Step]
) -> list[list[float | None] | RuntimeError]:
    """The gradients that this rank has after each step, until the first error."""
    model = Branches()
    ddp = DistributedDataParallel(model, **options)  # every rank must reach this line
    rank = dist.get_rank()
    outcomes: list[list[float | None] | RuntimeError] = []
    for step in steps:
        try:
            outcomes.append(gradients(model, ddp, rank, step[rank % 2]))
        except RuntimeError as error:  # no message is on its way: the process group still works
            return [*outcomes, error]
    return outcomes


def gather_gradients(own_gradients: list[float | None]) -> list[list[float | None]]:
    """Every rank's three gradients."""
    rows = [own_gradients] * dist.get_world_size()
    dist.all_gather_object(rows, own_gradients)
    return rows


def describe(step: Step, rows: list[list[float | None]]) -> str:
    """One line: the branches, each gradient (once if the ranks agree), and a verdict."""
    expected = expected_gradients(step, len(rows))
    right = all(
        equal_up_to_rounding(*pair) for row in rows for pair in zip(row, expected, strict=True)
    )
    cells = []
    for column in zip(*rows, strict=True):
        texts = ["none" if g is None else f"{g:.3g}" for g in column]
        cells.append(" | ".join(texts if len(set(texts)) > 1 else texts[:1]))
    verdict = "the mean" if right else "NOT averaged, and no error"
    return LINE_FORMAT.format(" | ".join(dict.fromkeys(step)), *cells, verdict)


def equal_up_to_rounding(a: float | None, b: float | None) -> bool:
    """Whether two gradients are equal up to rounding; none is equal to none only."""
    if a is None or b is None:
        return a is b
    return isclose(a, b, rel_tol=1e-6)


def main() -> None:
    Parser(__doc__).parse_args()
    join_on_this_machine(
        "04_ddp_torchrun/unused_parameters.py", "one rank has no other to wait for"
    )
    lines = [LINE_FORMAT.format("branch", "stem", "left", "right", "").rstrip()]
    for options, steps in CASES:
        lines.append("\n" + (", ".join(f"{name}={on}" for name, on in options.items()) or "DDP"))
        for step, outcome in zip(steps, gradients_after_steps(options, steps), strict=False):
            if isinstance(outcome, RuntimeError):
                sentence = str(outcome).split(". ")[0].split(", e.g.")[0]
                lines.append(f"  {' | '.join(dict.fromkeys(step)):14}{type(outcome).__name__}:")
                lines.append(f"    {sentence}")
            else:
                lines.append(describe(step, gather_gradients(outcome)))
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
