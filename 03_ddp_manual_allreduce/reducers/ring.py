"""All-reduce as a ring: each rank sends to its right neighbor and receives from its left one.

    python 03_ddp_manual_allreduce/reducers/ring.py --world-size 4

The tensor is cut into as many chunks as there are ranks. On its first way around the ring, a chunk
collects the sum over all ranks (reduce-scatter). On the second, the complete chunk reaches every
rank (all-gather). So a rank sends 2 (n - 1) / n of the tensor: less than twice, for any number n.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
Journal of Parallel and Distributed Computing 69 (2009).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from common.options import Parser, UsageError, exit_on, int_at_least
from local_ranks.ranks import run_ranks

PIECE_BYTES = 2**22  # bytes of a piece: while one is added up, the next one is sent


def simple_all_reduce(tensor: Tensor, after_step: Callable[[Tensor], object]) -> None:
    """Leave the sum of all ranks' tensors in each; call after_step(tensor) after each step.

    tensor: one dimension, with the same length on every rank.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)  # views; their lengths differ by at most 1

    def step(leaving: Tensor, arriving: Tensor) -> Tensor:
        arrived = torch.empty_like(arriving)
        receiving: Any = dist.irecv(arrived, (rank - 1) % n)
        sending: Any = dist.isend(leaving, (rank + 1) % n)
        receiving.wait()
        sending.wait()
        return arrived

    for s in range(n - 1):  # reduce-scatter: add my chunk to what arrives, and pass it on
        chunk = chunks[(rank - s - 1) % n]
        chunk += step(chunks[(rank - s) % n], chunk)
        after_step(tensor)
    for s in range(n - 1):  # all-gather: chunk rank + 1 is complete here; pass complete ones on
        chunk = chunks[(rank - s) % n]
        chunk.copy_(step(chunks[(rank - s + 1) % n], chunk))
        after_step(tensor)


def ring_all_reduce(tensor: Tensor) -> int:
    """Sum like simple_all_reduce, but faster: chunks go in pieces, and no piece waits for another.

    tensor: contiguous, of the same shape on every rank. Returns the bytes that this rank sent.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    flat = tensor.view(-1).cpu()  # a copy only if it comes from a GPU
    length = max(1, PIECE_BYTES // flat.element_size())
    chunks = [
        [piece for piece in chunk.split(length) if len(piece)]  # empty if there are more ranks
        for chunk in flat.tensor_split(n)
    ]
    steps = 2 * (n - 1)
    # What arrives in step s, chunk (rank - s - 1), is what leaves in step s + 1.
    targets = [(s, piece) for s in range(steps) for piece in chunks[(rank - s - 1) % n]]
    # In the first n - 1 steps, what arrives is added, so it must not overwrite.
    scratch = flat.new_empty(2, min(length, len(flat)))  # one buffer is added up as the other fills
    buffers = [
        scratch[index % 2, : len(piece)] if step < n - 1 else piece
        for index, (step, piece) in enumerate(targets)
    ]
    sends: list[Any] = [dist.isend(piece, right) for piece in chunks[rank] if steps]
    sent = sum(piece.nbytes for piece in chunks[rank] if steps)
    for (step, target), arrived in zip(targets, receive(buffers, left), strict=True):
        if step < n - 1:
            target += arrived
        if step + 1 < steps:
            sends.append(dist.isend(target, right))
            sent += target.nbytes
    for work in sends:
        work.wait()
    if tensor.is_cuda:
        tensor.view(-1).copy_(flat)
    return sent


def receive(buffers: list[Tensor], source: int) -> Iterator[Tensor]:
    """Fill the buffers in turn and yield each, while the next one is already requested."""
    requests: list[Any] = []
    for index, buffer in enumerate(buffers):
        for ahead in buffers[len(requests) : index + 2]:
            requests.append(dist.irecv(ahead, source))
        requests[index].wait()
        yield buffer


def trace(rank: int, length: int) -> tuple[int, list[str]]:
    """Return the bytes that the faster ring sends, and its chunks before and after each step."""
    numbers = torch.full((length,), 10**rank, dtype=torch.int64)
    sent, lines = ring_all_reduce(numbers.clone()), []

    def note(tensor: Tensor) -> None:
        lines.append(" ".join(str(number) for number in tensor.tolist()))

    note(numbers)
    simple_all_reduce(numbers, note)
    return sent, lines


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--world-size",
        default=4,
        type=int_at_least(1, below=11),
        metavar="N",
        help="ranks to start, and numbers in the tensor of each: at most 10",
    )
    n = parser.parse_args().world_size
    sent, columns = zip(*run_ranks(n, trace, n), strict=True)
    steps = ["start", *(f"{lap} {s}" for lap in ("sum", "share") for s in range(1, n))]
    rows = [(name, *row) for name, row in zip(steps, zip(*columns, strict=True), strict=True)]
    print(tabulate(rows, ["", *(f"rank {rank}" for rank in range(n))], disable_numparse=True))
    print(f"bytes sent by each rank: {sent}; of its tensor: {8 * n}")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
