"""What each replica sees of a batch: 100 random samples, in batches of 30, on 1 to 8 replicas.

    python 02_data_parallel/shapes.py
    python 02_data_parallel/shapes.py --replicas 4 7

The replicas share the CPU: the shapes are those of as many GPUs.
"""

from collections.abc import Iterable
from itertools import groupby
from threading import current_thread

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from common.options import Parser, UsageError, exit_on, int_at_least
from from_scratch import DataParallel

Shape = tuple[int, ...]
SEEN: dict[int, tuple[Shape, Shape]] = {}  # replica: shapes of its input and output


class Watched(nn.Module):
    """A linear layer that notes what passes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:  # (local batch, 5) -> (local batch, 2)
        outputs = self.layer(inputs)
        # Not print(): the replicas run at the same time, so their lines would come in any order.
        replica = int(current_thread().name.removeprefix("replica "))
        SEEN[replica] = (tuple(inputs.shape), tuple(outputs.shape))
        return outputs


def shapes_of(model: nn.Module, batch: Tensor) -> tuple[list[tuple[Shape, Shape]], Shape]:
    """The shapes in every replica that had work, in order, and the shape of the output."""
    SEEN.clear()
    output = model(batch)
    return [SEEN[replica] for replica in sorted(SEEN)], tuple(output.shape)


def shapes_in_words(shapes: Iterable[Shape]) -> str:
    """Equal neighbors together: 2 × (4, 5), 1 × (2, 5)."""
    return ", ".join(f"{len(list(same))} × {shape}" for shape, same in groupby(shapes))


def rows(replicas: int) -> list[tuple]:
    """A row for each batch size that occurs."""
    loader = DataLoader(TensorDataset(torch.randn(100, 5)), batch_size=30)  # 30, 30, 30, 10
    model = DataParallel(Watched(), [torch.device("cpu")] * replicas)
    row_of_size = {}
    for (batch,) in loader:
        replica_shapes, gathered = shapes_of(model, batch)
        inputs, outputs = zip(*replica_shapes, strict=True)
        idle = replicas - len(replica_shapes)
        into, out = shapes_in_words(inputs), shapes_in_words(outputs)
        row_of_size[len(batch)] = (replicas, tuple(batch.shape), into, out, gathered, idle)
    return list(row_of_size.values())


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--replicas",
        nargs="+",
        default=[1, 2, 3, 8],
        type=int_at_least(1),
        metavar="N",
        help="numbers of replicas, one part of the table for each",
    )
    table = [row for replicas in parser.parse_args().replicas for row in rows(replicas)]
    headers = ("replicas", "batch", "into the replicas", "out of them", "gathered", "idle")
    print(tabulate(table, headers, disable_numparse=True))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
