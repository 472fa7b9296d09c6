"""Collectives: they move tensors between ranks through shared memory, and add them up there.

Every rank has a row in each of two slots. A tensor larger than a row goes in pieces, by turns in
the two slots. A rank that has arrived with a piece has read the one before.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from shm import fast
from shm.calls import Op
from shm.fast import put
from shm.segment import SPINS, CallSteps, Segment

# A row is small enough to be in a cache when others read it, and large enough for a meeting of all
ROW_BYTES = 2**21
MAX_UNSLICED_BYTES = 2**16  # three or more ranks add up a larger piece in slices, one per rank

FUNCTION_OF_OP: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,  # combine_rows divides the sum
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
DTYPES_OF_OP: dict[Op, list[torch.dtype]] = {
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
        self.pieces = 0  # how many pieces this rank has written
        size = self.world_size * ROW_BYTES
        self.slots = [segment.tensor(slot * size, size) for slot in (0, 1)]
        self.views: dict[tuple[torch.dtype, int], list[Tensor]] = {}  # both slots, by dtype, boxes
        self.c_state: fast.SumState | None = None
        if (library := fast.library()) and self.world_size <= fast.MAX_RANKS:
            state = fast.SumState(rank=self.rank, ranks=self.world_size, row_bytes=ROW_BYTES)
            state.sliced, state.counters = MAX_UNSLICED_BYTES, segment.address
            state.slots = self.slots[0].data_ptr()
            self.c_state, self.c_state_address = state, ctypes.addressof(state)
            self.c_all_reduce = library.all_reduce
            # How often C looks for the others' arrivals, in calls that return at once or wait
            self.spins_async = fast.SPINS_PER_YIELD
            self.spins_waiting = fast.SPINS_PER_YIELD * SPINS

    def pieces_of(
        self, length: int, dtype: torch.dtype, boxes: int = 1
    ) -> Iterator[tuple[Tensor, slice]]:
        """Cut N elements into pieces; yield the memory of each, and which part of N it holds.

        The memory is (world_size, boxes, n): a row for each rank, divided into boxes. The rows of
        the other ranks are ready after an arrival.
        """
        if (views := self.views.get((dtype, boxes))) is None:
            piece = ROW_BYTES // dtype.itemsize // boxes // 64 * 64  # whole cache lines
            rows = [slot.view(dtype).view(self.world_size, -1) for slot in self.slots]
            views = [each[:, : boxes * piece].unflatten(1, (boxes, piece)) for each in rows]
            self.views[dtype, boxes] = views
        # What is left of an interrupted call has another transfer number, so no rank takes it
        self.segment.transfers += 1
        piece = views[0].shape[2]
        for start in range(0, max(1, length), piece):
            part = slice(start, min(start + piece, length))
            self.pieces += 1
            yield views[self.pieces % 2][:, :, : part.stop - start], part

    def combine_rows(self, rows: Sequence[Tensor], op: Op) -> Tensor:
        """Combine the rows in the order of the ranks, so the result has the same bits on all."""
        total = reduce(FUNCTION_OF_OP[op], rows)
        return total.div_(self.world_size) if op == Op.AVG else total

    def all_reduce(self, tensor: Tensor, op: Op, call: int, root: int | None = None) -> CallSteps:
        """Add up the tensors; with a root, only there: the other ranks keep what they have."""
        dtype = fast.NUMBER_OF_DTYPE.get(tensor.dtype)
        if self.c_state and op == Op.SUM and dtype is not None and tensor.is_contiguous():
            c_root = -1 if root is None else root
            late = self.begin_sum(tensor, dtype, call, self.spins_async, c_root)
            yield from self.end_sum(call, late)
            return
        wants_it = root is None or root == self.rank
        for boxes, part in self.pieces_of(tensor.numel(), tensor.dtype):
            rows, output = boxes[:, 0], tensor[part]
            put(rows[self.rank], output)
            yield from self.segment.arrive(call)
            if self.world_size == 2 or output.nbytes <= MAX_UNSLICED_BYTES:
                if wants_it:
                    output.copy_(self.combine_rows(rows.unbind(), op))
                continue
            slices = rows.tensor_split(self.world_size, dim=1)
            own = slices[self.rank]
            own[self.rank] = self.combine_rows(own.unbind(), op)
            yield from self.segment.arrive(call)
            if wants_it:
                for rank, target in enumerate(output.tensor_split(self.world_size)):
                    target.copy_(slices[rank][rank])

    def begin_sum(self, tensor: Tensor, dtype: int, call: int, spins: int, root: int = -1) -> int:
        """Begin a sum in fast.c, and go as far as it goes at once.

        Returns DONE, or the rank that is awaited.
        """
        state, segment = self.c_state, self.segment
        assert state
        segment.transfers = transfers = segment.transfers + 1
        state.tensor, state.size, state.dtype = tensor.data_ptr(), tensor.nbytes, dtype
        state.root, state.call, state.transfer = root, call, transfers
        state.arrivals, state.pieces, state.start, state.next = segment.arrivals, self.pieces, 0, 0
        return self.continue_sum(call, spins)

    def continue_sum(self, call: int, spins: int) -> int:
        """Go on with a sum in fast.c, and look `spins` times for the others' arrivals.

        Returns DONE, or the rank that is awaited.
        """
        state, segment = self.c_state, self.segment
        assert state
        awaited = self.c_all_reduce(self.c_state_address, spins)
        segment.arrivals, self.pieces = state.arrivals, state.pieces
        if awaited <= fast.DIFFERS:
            segment.fail_as_different(fast.DIFFERS - awaited, call)
        return awaited

    def end_sum(self, call: int, awaited: int) -> CallSteps:
        """Carry a sum that begin_sum has begun to its end."""
        while awaited != fast.DONE:
            yield [awaited]
            awaited = self.continue_sum(call, self.spins_async)

    def gather(
        self, tensor: Tensor, outputs: dict[int, Tensor], call: int, source: int | None = None
    ) -> CallSteps:
        """Copy the tensor of each rank into outputs[rank]; with a source, only that rank writes."""
        for boxes, part in self.pieces_of(tensor.numel(), tensor.dtype):
            if source is None or source == self.rank:
                put(boxes[self.rank, 0], tensor[part])
            yield from self.segment.arrive(call)
            for rank, output in outputs.items():
                if rank != self.rank:
                    output[part] = boxes[rank, 0]
        if self.rank in outputs and outputs[self.rank] is not tensor:
            outputs[self.rank].copy_(tensor)

    def write_boxes(self, inputs: list[Tensor], boxes: Tensor, part: slice) -> None:
        """Write the parts of inputs[r], for each rank r, into the boxes of this rank's row."""
        for box, each in zip(boxes[self.rank], inputs, strict=True):
            content = each[part]
            put(box[: len(content)], content)

    def scatter(self, inputs: list[Tensor], output: Tensor, root: int, call: int) -> CallSteps:
        """Write inputs[r] into the row of rank r, on the root; then each rank reads its row.

        The root's own part stays where it is.
        """
        for boxes, part in self.pieces_of(output.numel(), output.dtype):
            if self.rank == root:
                for rank, each in enumerate(inputs):
                    if rank != root:
                        put(boxes[rank, 0], each[part])
            yield from self.segment.arrive(call)
            output[part] = inputs[root][part] if self.rank == root else boxes[self.rank, 0]

    def reduce_scatter(self, inputs: list[Tensor], output: Tensor, op: Op, call: int) -> CallSteps:
        for boxes, part in self.pieces_of(output.numel(), output.dtype, self.world_size):
            self.write_boxes(inputs, boxes, part)
            yield from self.segment.arrive(call)
            output[part] = self.combine_rows(boxes[:, self.rank].unbind(), op)

    def all_to_all(self, inputs: list[Tensor], outputs: list[Tensor], call: int) -> CallSteps:
        """Send inputs[r], (any size,), to each rank r, whose outputs have the sizes that arrive."""
        sizes = torch.empty(self.world_size, self.world_size, dtype=torch.int64)  # (from, to)
        own_sizes = torch.tensor([len(each) for each in inputs])
        yield from self.gather(own_sizes, dict(enumerate(sizes)), call)
        for rank, (size, output) in enumerate(zip(sizes[:, self.rank], outputs, strict=True)):
            if size != len(output):
                what = f"sends {size} elements, but rank {self.rank} expects {len(output)}"
                self.segment.fail(f"rank {rank} {what}")
        outputs[self.rank].copy_(inputs[self.rank])
        elsewhere = list(inputs)
        elsewhere[self.rank] = inputs[self.rank][:0]
        sizes.fill_diagonal_(0)
        for boxes, part in self.pieces_of(int(sizes.max()), inputs[0].dtype, self.world_size):
            self.write_boxes(elsewhere, boxes, part)
            yield from self.segment.arrive(call)
            for rank, output in enumerate(outputs):
                if rank != self.rank:
                    target = output[part]
                    target.copy_(boxes[rank, self.rank, : len(target)])

    def gather_uneven(self, tensor: Tensor, call: int) -> CallSteps:
        """Return the tensors of all ranks, (any length,), as the value of `yield from`."""
        lengths = torch.empty(self.world_size, 1, dtype=torch.int64)
        yield from self.gather(torch.tensor([len(tensor)]), dict(enumerate(lengths)), call)
        padded = tensor.new_zeros(int(lengths.max()))
        padded[: len(tensor)] = tensor
        rows = padded.new_empty(self.world_size, len(padded))
        yield from self.gather(padded, dict(enumerate(rows)), call)
        return [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]
