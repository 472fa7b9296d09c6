"""Let one process draw and normalize by row what two ranks do, for scripts that draw in a step.

What torch draws without a generator of all ranks is replaced: row i of rank r gets the same number,
whether it is row i of a batch on two ranks or row 2 i + r on one. BatchNorm normalizes the rows of
each rank by themselves.
"""

from typing import Any

import torch
from torch import Tensor, nn

from evidence.traces import RANKS, put_in


def same_rows(rank: int, world: int) -> None:
    """Prepare the process of a rank; a process that is alone gets the rows of two ranks."""
    DrawsByRow(rank, world).install()
    if world == 1:
        normalize_by_rank()


class DrawsByRow:
    """Replaces torch's random numbers by numbers that depend on call, rank and row."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.calls = rank, world, 0

    def generator(self, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * self.calls + rank)

    def rows(self, draw: Any, shape: tuple[int, ...]) -> Tensor:
        """draw(shape, generator): by row, unless there is a single one for the whole batch."""
        self.calls += 1
        if not shape or shape[0] == 1:
            return draw(shape, self.generator(0))
        if self.world > 1:
            return draw(shape, self.generator(self.rank))
        part = (shape[0] // RANKS, *shape[1:])
        parts = [draw(part, self.generator(rank)) for rank in range(RANKS)]
        return torch.stack(parts, 1).flatten(0, 1)

    def by_row(self, original: Any) -> Any:
        """Replace torch.randn or torch.rand with a function that draws by row."""

        def drawn(*size: Any, **options: Any) -> Tensor:
            if is_common(options):
                return original(*size, **options)
            shape = tuple(size[0]) if size and not isinstance(size[0], int) else size
            return self.rows(lambda s, g: original(s, generator=g), shape)

        return drawn

    def integers_by_row(self, original: Any) -> Any:
        def integers(low: int, high: int, size: Any, **options: Any) -> Tensor:
            if is_common(options):
                return original(low, high, size, **options)
            return self.rows(lambda s, g: original(low, high, s, generator=g), tuple(size))

        return integers

    def permutation_by_row(self, original: Any) -> Any:
        def permutation(n: int, **options: Any) -> Tensor:
            if is_common(options):
                return original(n, **options)
            self.calls += 1
            if self.world > 1:
                return original(n, generator=self.generator(0))
            of_rank = original(n // RANKS, generator=self.generator(0)) * RANKS
            return torch.stack([of_rank + rank for rank in range(RANKS)], 1).flatten()

        return permutation

    def install(self) -> None:
        put_in(torch, randn=self.by_row(torch.randn), rand=self.by_row(torch.rand))
        put_in(torch, randn_like=lambda x: torch.randn(x.shape))
        put_in(torch, randint=self.integers_by_row(torch.randint))
        put_in(torch, randperm=self.permutation_by_row(torch.randperm))
        put_in(nn.functional, dropout=dropout, dropout2d=dropout2d)


def is_common(options: dict) -> bool:
    """Does the call have a generator that all ranks seed alike? Then it stays as it is."""
    generator = options.get("generator")
    return generator is not None and generator.initial_seed() < 10_000


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return x * (torch.rand(x.shape) >= p).to(x.dtype) / (1 - p) if training and p else x


def dropout2d(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training:
        return x
    mask = (torch.rand(*x.shape[:2]) >= p).to(x.dtype) / (1 - p)
    return x * mask[:, :, None, None]


def normalize_by_rank() -> None:
    """Normalize each rank's rows by themselves; keep the running statistics of rank 0."""
    original = nn.functional.batch_norm

    def batch_norm(x: Tensor, mean: Any, var: Any, *rest: Any, **more: Any) -> Tensor:
        training = rest[2] if len(rest) > 2 else more.get("training", False)
        if not training:
            return original(x, mean, var, *rest, **more)
        first = original(x[0::RANKS], mean, var, *rest, **more)
        other = original(x[1::RANKS], mean.clone(), var.clone(), *rest, **more)
        return torch.stack([first, other], 1).flatten(0, 1)

    put_in(nn.functional, batch_norm=batch_norm)
