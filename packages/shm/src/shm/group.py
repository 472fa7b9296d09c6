"""The process group that torch calls: each method checks its arguments and starts work.

The other files of the folder carry the work out.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shm import fast
from shm.barrier import MonitoredBarriers
from shm.calls import Op, encode_call, encode_size
from shm.exchange import DTYPES_OF_OP, ROW_BYTES, Exchange
from shm.messages import BOX_BYTES, CACHE_LINES_PER_BOX, Messages
from shm.segment import CACHE_LINES_PER_RANK, MESSAGE_BELL, CallSteps, Segment
from shm.tensors import (
    Tensors,
    copy_if_overlapping,
    equal_parts,
    flat,
    put_back,
    require_own_memory,
    require_same_size,
    split_rows,
    without_autograd,
    without_gaps,
)
from shm.work import CallQueue, Completed, Work, scheduler


def checked_op(options: Any, tensors: Tensors) -> Op:
    """Return the op of the options, SUM by default; ValueError if a tensor's dtype lacks it."""
    op = options.reduceOp.op if options else Op.SUM
    for tensor in tensors:
        if tensor.dtype not in DTYPES_OF_OP.get(op, []):
            ops = [each.name for each, dtypes in DTYPES_OF_OP.items() if tensor.dtype in dtypes]
            what = " or ".join(ops) or "a type of number that gloo takes"
            raise ValueError(f"shm: got {op} of {tensor.dtype}, expected {what}")
    return op


def gives_up_if_interrupted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that the program calls: Ctrl-C anywhere in it ends the group."""

    @wraps(method)
    def interruptible(self: "SharedMemoryGroup", *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except BaseException as error:
            self.give_up_if_interrupted(error)
            raise

    return interruptible


class SharedMemoryGroup(dist.ProcessGroup):
    """The process group that torch makes for the backend "shm"."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        boxes = size * size
        slot_bytes = 2 * size * ROW_BYTES  # both slots
        barrier_line = CACHE_LINES_PER_RANK * size  # the first cache line of the barriers' counters
        box_line = barrier_line + size  # the first cache line of the boxes' counters
        cache_lines = box_line + CACHE_LINES_PER_BOX * boxes
        tensor_bytes = slot_bytes + boxes * BOX_BYTES
        self.segment = Segment(store, rank, size, cache_lines, tensor_bytes, timeout)
        self.exchange = Exchange(self.segment)
        self.messages = Messages(self.segment, box_line, slot_bytes)
        self.monitored_barriers = MonitoredBarriers(self.segment, barrier_line)
        self.collectives: CallQueue = deque()
        self.group_title = ""
        self.description = ""
        # The dtypes that fast.c adds up: their number there, and that of the call without its size
        self.sums_in_c: dict[torch.dtype, tuple[int, int]] = {}
        if self.exchange.c_state:
            for dtype, number in fast.NUMBER_OF_DTYPE.items():
                call = encode_call("all_reduce", None, dtype, None, Op.SUM)
                self.sums_in_c[dtype] = number, call

    def start(self, steps: CallSteps, outputs: Any, options: Any) -> Work:
        """Begin a collective; asyncOp says that the program goes on while it runs, as in DDP."""
        require_own_memory(outputs)
        work = Work(self.segment, steps, outputs, options)
        wait = bool(options and not options.asyncOp)
        return scheduler.start(self.collectives, work, wait)

    def give_up_if_interrupted(self, error: BaseException) -> None:
        """End the group on KeyboardInterrupt and the like.

        An Exception may come from a wrong argument, which leaves the group as it was. If it comes
        later, the scheduler ends the group.
        """
        if not isinstance(error, Exception):
            scheduler.give_up(self.segment, error)

    # Collectives. Of each, torch calls one method, and another one returns its CallSteps

    def allreduce(self, tensors: Tensors, options: Any = None) -> Work:
        try:  # does what @gives_up_if_interrupted does, and is faster
            if options and (work := self.sum_at_once(tensors, options)):
                return work
            steps = self.all_reduce_steps(tensors, checked_op(options, tensors))
            return self.start(steps, tensors, options)
        except BaseException as error:
            self.give_up_if_interrupted(error)
            raise

    def sum_at_once(self, tensors: Tensors, options: Any) -> Work | None:
        """Add up one tensor in fast.c, without a generator; None if that is not possible now.

        This is the most frequent call, and for a small tensor a generator costs more than the sum.
        """
        tensor = tensors[0]
        if not (options.reduceOp == Op.SUM and len(tensors) == 1 and tensor.is_cpu):
            return None
        sum_in_c = self.sums_in_c.get(tensor.dtype)
        if sum_in_c is None or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return None
        if tensor.is_neg():  # its memory holds the other sign, see flat()
            return None
        dtype, call = sum_in_c
        call += encode_size(tensor.numel())
        work = scheduler.begin_if_idle(self.segment, self.begin_sum, tensors, dtype, call, options)
        if work is None or work.done:
            return work
        return scheduler.carry_on(work, wait=not options.asyncOp)

    def begin_sum(self, tensors: Tensors, dtype: int, call: int, options: Any) -> Work:
        """Add up in fast.c what goes at once; enqueue the rest if a rank does not come in time."""
        exchange, segment = self.exchange, self.segment
        transfers = segment.transfers
        spins = exchange.spins_async if options.asyncOp else exchange.spins_waiting
        awaited = exchange.begin_sum(tensors[0], dtype, call, spins)
        if awaited == fast.DONE:
            completed = Completed()
            completed.outputs = tensors
            return completed
        work = Work(segment, exchange.end_sum(call, awaited), tensors, options)
        work.transfers_before = transfers
        scheduler.enqueue(self.collectives, work)
        return work

    def all_reduce_steps(self, tensors: Tensors, op: Op, root: int | None = None) -> CallSteps:
        """Add up the tensors; with a root, only there: the other ranks keep what they have."""
        name = "all_reduce" if root is None else "reduce"
        for tensor in tensors:
            if tensor.layout == torch.sparse_coo:
                yield from self.sparse_all_reduce_steps(tensor, op)
            else:
                values = flat(tensor)
                call = encode_call(name, values.numel(), values.dtype, root, op)
                yield from self.exchange.all_reduce(values, op, call, root)
                put_back(tensor, values)

    def sparse_all_reduce_steps(self, tensor: Tensor, op: Op) -> CallSteps:
        if op != Op.SUM:
            raise ValueError(f"shm: got {op} of a sparse tensor, expected SUM")
        own = without_autograd(tensor).coalesce()
        call = encode_call("sparse all_reduce", own.numel(), own.dtype)
        shape = own.values().shape[1:]  # the shape of the value at one index
        all_indices = yield from self.exchange.gather_uneven(flat(own.indices().t()), call)
        all_values = yield from self.exchange.gather_uneven(flat(own.values()), call)
        total = torch.zeros_like(own)
        for indices, values in zip(all_indices, all_values, strict=True):
            indices = indices.view(-1, own.sparse_dim()).t()
            values = values.view(indices.shape[1], *shape)
            total = total + torch.sparse_coo_tensor(indices, values, own.shape)
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    @gives_up_if_interrupted
    def reduce(self, tensors: Tensors, options: Any) -> Work:
        op = checked_op(options, tensors)
        steps = self.all_reduce_steps(tensors, op, options.rootRank)
        return self.start(steps, tensors, options)

    @gives_up_if_interrupted
    def broadcast(self, tensors: Tensors, options: Any) -> Work:
        return self.start(self.broadcast_steps(tensors, options.rootRank), tensors, options)

    def broadcast_steps(self, tensors: Tensors, root: int) -> CallSteps:
        for tensor in tensors:
            values = flat(tensor)
            call = encode_call("broadcast", values.numel(), values.dtype, root)
            yield from self.exchange.gather(values, {root: values}, call, source=root)
            put_back(tensor, values)

    @gives_up_if_interrupted
    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Work:
        return self.start(self.gather_steps(outputs[0], inputs[0]), outputs, options)

    def gather_steps(self, targets: Tensors, tensor: Tensor, root: int | None = None) -> CallSteps:
        require_same_size(targets, tensor)
        values = [flat(target) for target in targets]
        name = "all_gather" if root is None else "gather"
        call = encode_call(name, tensor.numel(), tensor.dtype, root)
        content = copy_if_overlapping(flat(tensor), values, self.rank())
        yield from self.exchange.gather(content, dict(enumerate(values)), call)
        for target, value in zip(targets, values, strict=True):
            put_back(target, value)

    def coalesced_gather_steps(self, pairs: list[tuple[Tensors, Tensor]]) -> CallSteps:
        for targets, tensor in pairs:
            yield from self.gather_steps(targets, tensor)

    @gives_up_if_interrupted
    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, options: Any = None
    ) -> Work:
        pairs = list(zip(map(list, zip(*outputs, strict=True)), inputs, strict=True))
        return self.start(self.coalesced_gather_steps(pairs), outputs, options)

    @gives_up_if_interrupted
    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], options)

    @gives_up_if_interrupted
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any = None
    ) -> Work:
        pairs = [
            (equal_parts(output, self.size()), each)
            for output, each in zip(outputs, inputs, strict=True)
        ]
        return self.start(self.coalesced_gather_steps(pairs), outputs, options)

    @gives_up_if_interrupted
    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Work:
        targets = outputs[0] if outputs else []
        return self.start(self.gather_steps(targets, inputs[0], options.rootRank), outputs, options)

    @gives_up_if_interrupted
    def gather_single(self, output: Tensor, tensor: Tensor, options: Any) -> Work:
        is_root = options.rootRank == self.rank()
        return self.gather([equal_parts(output, self.size())] if is_root else [], [tensor], options)

    @gives_up_if_interrupted
    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        parts = inputs[0] if inputs else []
        return self.start(self.scatter_steps(outputs[0], parts, options.rootRank), outputs, options)

    def scatter_steps(self, output: Tensor, inputs: Tensors, root: int) -> CallSteps:
        require_same_size(inputs, output)
        parts, values = [flat(each) for each in inputs], flat(output)
        call = encode_call("scatter", values.numel(), values.dtype, root)
        yield from self.exchange.scatter(parts, values, root, call)
        put_back(output, values)

    @gives_up_if_interrupted
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any = None) -> Work:
        op = checked_op(options, outputs)
        return self.start(
            self.reduce_scatter_steps([(outputs[0], inputs[0])], op), outputs, options
        )

    def reduce_scatter_steps(self, pairs: list[tuple[Tensor, Tensors]], op: Op) -> CallSteps:
        for output, inputs in pairs:
            require_same_size(inputs, output)
            parts, values = [flat(each) for each in inputs], flat(output)
            call = encode_call("reduce_scatter", values.numel(), values.dtype, op=op)
            yield from self.exchange.reduce_scatter(parts, values, op, call)
            put_back(output, values)

    @gives_up_if_interrupted
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], options)

    @gives_up_if_interrupted
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any = None
    ) -> Work:
        op = checked_op(options, outputs)
        pairs = [
            (output, equal_parts(each, self.size()))
            for output, each in zip(outputs, inputs, strict=True)
        ]
        return self.start(self.reduce_scatter_steps(pairs, op), outputs, options)

    @gives_up_if_interrupted
    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        return self.start(self.all_to_all_steps(outputs, inputs), outputs, options)

    def all_to_all_steps(self, outputs: Tensors, inputs: Tensors) -> CallSteps:
        values = [flat(output) for output in outputs]
        call = encode_call("all_to_all", dtype=inputs[0].dtype)
        yield from self.exchange.all_to_all([flat(each) for each in inputs], values, call)
        for output, value in zip(outputs, values, strict=True):
            put_back(output, value)

    @gives_up_if_interrupted
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: Any = None,
    ) -> Work:
        outputs = split_rows(output, output_sizes, self.size())
        inputs = split_rows(tensor, input_sizes, self.size())
        return self.alltoall(outputs, inputs, options)

    @gives_up_if_interrupted
    def barrier(self, opts: Any = None) -> Work:
        steps = self.exchange.all_reduce(torch.zeros(0), Op.SUM, encode_call("barrier"))
        return self.start(steps, [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        timeout = self.segment.timeout if timeout is None else timeout
        self.monitored_barriers.meet(timeout, wait_all_ranks)

    # Messages between two ranks

    @gives_up_if_interrupted
    def send(self, tensors: Tensors, rank: int, tag: int) -> Work:
        content = without_gaps(flat(tensors[0])).view(torch.uint8)
        work = Work(self.segment, self.messages.send(content, rank, tag), tensors)
        return self.start_message(self.messages.outgoing[rank], work)

    @gives_up_if_interrupted
    def recv(self, tensors: Tensors, rank: int | None, tag: int) -> Work:
        require_own_memory(tensors)
        work = Work(self.segment, self.receive_steps(tensors[0], rank, tag), tensors)
        return self.start_message(deque(), work)

    def start_message(self, queue: CallQueue, work: Work) -> Work:
        work.bell = MESSAGE_BELL
        return scheduler.start(queue, work, wait=False)

    @gives_up_if_interrupted
    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def receive_steps(self, tensor: Tensor, rank: int | None, tag: int) -> CallSteps:
        values = without_gaps(flat(tensor))
        source = yield from self.messages.receive(values.view(torch.uint8), rank, tag)
        put_back(tensor, values)
        return source

    # What torch asks about the group

    def getBackendName(self) -> str:  # noqa: N802
        return "shm"

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_title

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.group_title = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self.description = description

    @property
    def _device_types(self) -> list[torch.device]:
        # Empty while torch makes the group, or it attaches a recorder that only groups of C++ have
        return [torch.device("cpu")] if self in dist.distributed_c10d._world.pg_map else []

    def _get_backend(self, _: torch.device) -> dist.ProcessGroup:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.segment.timeout = timeout

    def shutdown(self) -> None:
        self.segment.close()
        scheduler.poll()  # calls that still run end with an error

    abort, allreduce_coalesced = shutdown, allreduce
    # The same methods under the names of torch 2.11, and under the second names of later versions
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base, recvAnysource = all_to_all_single, recv_anysource  # noqa: N815
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single
