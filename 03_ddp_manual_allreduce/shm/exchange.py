"""Moves tensors between ranks through shared memory, and adds them up there.

Every rank has a row in each of two slots. A tensor larger than a row goes in pieces, by turns in
the two slots. A rank that has arrived with a piece has read the one before.
"""

from collections.abc import Callable, Iterator
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from shm.segment import Segment

ROW = 2**20  # bytes: what is written there should still be in the cache when others read it
SLICED = 2**16  # bytes: three or more ranks add up a larger piece in slices, one per rank

Op = dist.ReduceOp.RedOpType
COMBINE: dict[Op, Callable[..., Tensor]] = {
    **{Op.SUM: torch.add, Op.AVG: torch.add, Op.PRODUCT: torch.mul},  # an average is divided later
    **{Op.MIN: torch.minimum, Op.MAX: torch.maximum},
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8]
DTYPES += [torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]


class Exchange:
    """Collectives on flat tensors, (N,). The slots are the first bytes of the segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self.rank, self.ranks, self.pieces = segment, segment.rank, segment.ranks, 0
        size = self.ranks * ROW
        slots = [segment.tensor(slot * size, size) for slot in (0, 1)]
        self.slots = {d: [slot.view(d).view(self.ranks, -1) for slot in slots] for d in DTYPES}

    def share(self, kind: int, tensor: Tensor, detail: int) -> Iterator[tuple[Tensor, slice]]:
        """Piece by piece: all ranks' parts of that piece, (ranks, n), and which part of N it is."""
        kind = hash((kind, len(tensor), DTYPES.index(tensor.dtype), detail))
        piece = ROW // tensor.element_size()
        for start in range(0, max(1, len(tensor)), piece):
            part = slice(start, min(start + piece, len(tensor)))
            self.pieces += 1
            rows = self.slots[tensor.dtype][self.pieces % 2][:, : part.stop - start]
            rows[self.rank].copy_(tensor[part])
            self.segment.arrive(kind)
            yield rows, part

    def combined(self, rows: Tensor, op: Op) -> Tensor:
        """The sum of the rows, or another op: in the order of ranks, so equal on all ranks."""
        total = reduce(COMBINE[op], rows.unbind())
        return total.div_(self.ranks) if op == Op.AVG else total

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        for rows, part in self.share(0, tensor, op.value):
            output = tensor[part]
            if self.ranks == 2 and op == Op.SUM:  # a + b has the same bits as b + a
                output.add_(rows[1 - self.rank])
            elif self.ranks == 2 or output.nbytes <= SLICED:
                output.copy_(self.combined(rows, op))
            else:
                slices = rows.tensor_split(self.ranks, dim=1)
                slices[self.rank][self.rank] = self.combined(slices[self.rank], op)
                self.segment.arrive(0)
                for rank, target in enumerate(output.tensor_split(self.ranks)):
                    target.copy_(slices[rank][rank])

    def gather(self, tensor: Tensor, outputs: dict[int, Tensor], root: int = -1) -> None:
        """Copy the tensors of the ranks in outputs. root: the same number on all ranks."""
        for rows, part in self.share(1, tensor, root):
            for rank, output in outputs.items():
                output[part] = rows[rank]
