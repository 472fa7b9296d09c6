"""Collectives: moves tensors between ranks through shared memory, and adds them up there.

Every rank has a row in each of two slots. A tensor larger than a row goes in pieces, by turns in
the two slots. A rank that has arrived with a piece has read the one before.
"""

from collections.abc import Callable, Iterator
from functools import reduce

import torch
from torch import Tensor

from shm.calls import Op
from shm.segment import Segment, Steps

ROW_BYTES = 2**20  # what is written there should still be in the cache when others read it
SLICED = 2**16  # bytes: three or more ranks add up a larger piece in slices, one per rank

COMBINE: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,  # divided later
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
REALS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
COMPUTED_WITH: dict[Op, list[torch.dtype]] = {
    Op.SUM: INTEGERS + REALS + COMPLEX,
    Op.PRODUCT: INTEGERS + REALS + COMPLEX,
    Op.MIN: INTEGERS + REALS,
    Op.MAX: INTEGERS + REALS,
    Op.AVG: REALS + COMPLEX,
    Op.BAND: INTEGERS,
    Op.BOR: INTEGERS,
    Op.BXOR: INTEGERS,
}


class Exchange:
    """Collectives on flat tensors, (N,). The slots are the first bytes of the segment.

    call: the same number on all ranks if they have called the same, see calls.py.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.rank = segment.rank
        self.world_size = segment.world_size
        self.pieces = 0  # that this rank has written
        size = self.world_size * ROW_BYTES
        self.slots = [segment.tensor(slot * size, size) for slot in (0, 1)]
        self.views: dict[torch.dtype, list[Tensor]] = {}  # of the slots: (ranks, elements)

    def write(self, tensor: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Write this rank's part piece by piece. Yields all ranks' rows of that piece, (ranks, n),
        which may be read after an arrival, and which part of N it is.
        """
        if (views := self.views.get(tensor.dtype)) is None:
            views = [slot.view(tensor.dtype).view(self.world_size, -1) for slot in self.slots]
            self.views[tensor.dtype] = views
        self.segment.transfers += 1  # so that what is left of an interrupted one fits to no other
        piece = ROW_BYTES // tensor.element_size()
        for start in range(0, max(1, len(tensor)), piece):
            part = slice(start, min(start + piece, len(tensor)))
            self.pieces += 1
            rows = views[self.pieces % 2][:, : part.stop - start]
            rows[self.rank].copy_(tensor[part])
            yield rows, part

    def combine_rows(self, rows: Tensor, op: Op) -> Tensor:
        """The sum of the rows, or another op: in the order of ranks, so equal on all ranks."""
        total = reduce(COMBINE[op], rows.unbind())
        return total.div_(self.world_size) if op == Op.AVG else total

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> Steps:
        for rows, part in self.write(tensor):
            yield from self.segment.arrive(call)
            output = tensor[part]
            if self.world_size == 2 and op == Op.SUM:  # a + b has the same bits as b + a
                output.add_(rows[1 - self.rank])
            elif self.world_size == 2 or output.nbytes <= SLICED:
                output.copy_(self.combine_rows(rows, op))
            else:
                slices = rows.tensor_split(self.world_size, dim=1)
                slices[self.rank][self.rank] = self.combine_rows(slices[self.rank], op)
                yield from self.segment.arrive(call)
                for rank, target in enumerate(output.tensor_split(self.world_size)):
                    target.copy_(slices[rank][rank])

    def gather(self, tensor: Tensor, outputs: dict[int, Tensor], call: int) -> Steps:
        """Copy the tensors of the ranks in outputs."""
        for rows, part in self.write(tensor):
            yield from self.segment.arrive(call)
            for rank, output in outputs.items():
                output[part] = rows[rank]

    def all_to_all(self, inputs: list[Tensor], outputs: list[Tensor], call: int) -> Steps:
        """Send inputs[r], (any size,), to each rank r, whose outputs have the sizes that arrive."""
        sizes = torch.empty(self.world_size, self.world_size, dtype=torch.int64)  # (from, to)
        own_sizes = torch.tensor([len(each) for each in inputs])
        yield from self.gather(own_sizes, dict(enumerate(sizes)), call)
        for rank, (size, output) in enumerate(zip(sizes[:, self.rank], outputs, strict=True)):
            if size != len(output):
                what = f"sends {size} elements, but rank {self.rank} expects {len(output)}"
                self.segment.fail(f"rank {rank} {what}")
        everything = torch.cat(inputs)
        padded = everything.new_zeros(int(sizes.sum(dim=1).max()))
        padded[: len(everything)] = everything
        starts = sizes.cumsum(dim=1)[:, self.rank] - sizes[:, self.rank]  # of this rank's part
        for rows, part in self.write(padded):
            yield from self.segment.arrive(call)
            for row, start, output in zip(rows, starts.tolist(), outputs, strict=True):
                first = max(part.start, start)
                last = min(part.stop, start + len(output))
                if first < last:
                    output[first - start : last - start] = row[
                        first - part.start : last - part.start
                    ]

    def gather_uneven(self, tensor: Tensor, call: int) -> Steps:
        """All ranks' tensors, which may have different lengths: the value of `yield from`."""
        lengths = torch.empty(self.world_size, 1, dtype=torch.int64)
        yield from self.gather(torch.tensor([len(tensor)]), dict(enumerate(lengths)), call)
        padded = tensor.new_zeros(int(lengths.max()))
        padded[: len(tensor)] = tensor
        rows = padded.new_empty(self.world_size, len(padded))
        yield from self.gather(padded, dict(enumerate(rows)), call)
        return [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]
