"""All-reduce as a ring: each rank sends to its right neighbour and receives from its left one.

    python 03_ddp_manual_allreduce/ring.py --world-size 4

The tensor is cut into as many chunks as there are ranks. Once round the ring, each chunk collects
the sum over all ranks (reduce-scatter). Once more, and the finished chunks reach every rank
(all-gather). So a rank sends 2 (n - 1) / n of the tensor: less than twice, for any number n.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
Journal of Parallel and Distributed Computing 69 (2009).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from common.options import Parser, UsageError, number, usage_errors_exit

from ranks import start

PIECE = 2**22  # bytes of a message: while one is added up, the next is on its way


def all_reduce(tensor: Tensor) -> int:
    """Leave the sum of all ranks' tensors in each of them; returns the bytes that this rank sent.

    tensor: contiguous. Raises UsageError on every rank if shapes or dtypes differ.
    """
    mine = f"{list(tensor.shape)} {tensor.dtype}"
    all_ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)  # every rank must reach this line
    if len(set(all_ranks)) > 1:
        raise UsageError(f"the ranks' tensors differ: {all_ranks}; an all-reduce needs equal ones")
    return ring_all_reduce(tensor)


def ring_all_reduce(
    tensor: Tensor, ahead: int = 1, watch: Callable[[Tensor], object] = lambda flat: None
) -> int:
    """The ring itself, without the check.

    ahead: how many receives are asked for before they are needed. watch sees the flat tensor after
    each message.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    flat = tensor.view(-1).cpu()  # a copy only if it comes from a GPU
    length = max(1, PIECE // flat.element_size())
    chunks = [
        [piece for piece in chunk.split(length) if len(piece)]  # none, if there are more ranks
        for chunk in flat.tensor_split(world_size)
    ]
    steps = 2 * (world_size - 1)
    # In step s arrives chunk (rank - s - 1). It is also what leaves in step s + 1.
    arrivals = [(s, piece) for s in range(steps) for piece in chunks[(rank - s - 1) % world_size]]
    scratch = flat.new_empty(ahead + 1, min(length, len(flat)))

    def summing(step: int) -> bool:
        return step < world_size - 1  # the first lap, reduce-scatter

    def receive(place: int) -> tuple[Tensor, Any]:
        step, piece = arrivals[place]
        target = scratch[place % (ahead + 1), : len(piece)] if summing(step) else piece
        return target, dist.irecv(target, left)

    sends: list[tuple[Any, Tensor]] = [
        (dist.isend(piece, right), piece) for piece in chunks[rank] if steps
    ]
    receives: list[tuple[Tensor, Any]] = []
    for place, (step, piece) in enumerate(arrivals):
        while len(receives) < min(place + 1 + ahead, len(arrivals)):
            receives.append(receive(len(receives)))
        target, arrival = receives[place]
        arrival.wait()
        if summing(step):
            piece += target
        if step + 1 < steps:
            sends.append((dist.isend(piece, right), piece))
        watch(flat)
    for work, _ in sends:
        work.wait()
    if tensor.is_cuda:
        tensor.view(-1).copy_(flat)
    return sum(piece.nbytes for _, piece in sends)


def follow(length: int) -> tuple[int, list[str]]:
    """Bytes that this rank sent, and its chunks at the start and after every message."""
    numbers = torch.full((length,), 10 ** dist.get_rank(), dtype=torch.int64)
    seen = []

    def look(flat: Tensor) -> None:
        seen.append(" ".join(str(number) for number in flat.tolist()))

    look(numbers)
    return ring_all_reduce(numbers, ahead=0, watch=look), seen


def main() -> None:
    parser = Parser(__doc__)
    text = "ranks, and numbers in the tensor of each"
    parser.add_argument("--world-size", default=4, type=number(int, 1, 11), metavar="N", help=text)
    world_size = parser.parse_args().world_size
    sent, columns = zip(*start(world_size, follow, world_size), strict=True)
    laps = [f"{lap} {step}" for lap in ("sum", "share") for step in range(1, world_size)]
    headers = [f"rank {rank}" for rank in range(world_size)]
    rows = [
        (name, *row) for name, row in zip(["start", *laps], zip(*columns, strict=True), strict=True)
    ]
    print(tabulate(rows, ["", *headers], disable_numparse=True))
    print(f"bytes sent by each rank: {sent}; of its tensor: {8 * world_size}")


if __name__ == "__main__":
    with usage_errors_exit():
        main()
