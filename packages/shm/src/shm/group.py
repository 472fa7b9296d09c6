"""The process group that torch calls: each method checks its arguments and starts work.

The other files of the folder carry the work out.
"""

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shm import fast
from shm.barrier import MonitoredBarrier
from shm.calls import Op, number_of_call, number_of_size
from shm.exchange import COMPUTED_WITH, ROW_BYTES, Exchange
from shm.messages import BOX_BYTES, CACHE_LINES_PER_BOX, Messages
from shm.segment import CACHE_LINES_PER_RANK, MESSAGE_BELL, SPINS, Segment, Steps
from shm.tensors import (
    Tensors,
    equal_parts,
    flat,
    put_back,
    require_same_size,
    split_rows,
    without_autograd,
    without_gaps,
)
from shm.work import CallQueue, Completed, Work, pending


def op_of(options: Any, tensors: Tensors) -> Op:
    """The op of the options, SUM by default, if it can be used on these tensors."""
    op = options.reduceOp.op if options else Op.SUM
    for tensor in tensors:
        if tensor.dtype not in COMPUTED_WITH.get(op, []):
            ops = [each.name for each, dtypes in COMPUTED_WITH.items() if tensor.dtype in dtypes]
            what = " or ".join(ops) or "a type of number that gloo takes"
            raise ValueError(f"shm: got {op} of {tensor.dtype}, expected {what}")
    return op


def limit_of(options: Any) -> timedelta | None:
    """The time limit of one call, if it has one."""
    limit = options.timeout if options else timedelta(-1)
    return limit if limit > timedelta(0) else None


class SharedMemoryGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        boxes, rows = size * size, 2 * size * ROW_BYTES  # how many, and bytes
        first = CACHE_LINES_PER_RANK * size  # cache line of a box
        cache_lines = first + CACHE_LINES_PER_BOX * boxes
        self.segment = Segment(store, rank, size, cache_lines, rows + boxes * BOX_BYTES, timeout)
        self.exchange = Exchange(self.segment)
        self.messages = Messages(self.segment, first, rows)
        self.collectives: CallQueue = deque()
        self.group_title = ""
        self.description = ""
        self.number_of_sum = {
            number: number_of_call("all_reduce", None, dtype, None, Op.SUM)
            for dtype, number in fast.NUMBER_OF_DTYPE.items()
        }
        self.monitored = MonitoredBarrier(self.segment)

    def start(self, steps: Steps, outputs: Any, options: Any) -> Work:
        """Begin a collective; asyncOp says that the program goes on while it runs, as in DDP."""
        work = Work(self.segment, steps, outputs)
        wait = bool(options and not options.asyncOp)
        if pending.complete_at_once(work, wait):
            return work
        work.limit = limit_of(options) or work.limit
        return pending.start(self.collectives, work, wait)

    # Collectives: one method for the arguments, and one for the steps

    def allreduce(self, tensors: Tensors, options: Any = None) -> Work:
        if options and (work := self.sum_at_once(tensors, options)):
            return work
        op = op_of(options, tensors)
        return self.start(self.all_reduce_steps(tensors, op), tensors, options)

    def sum_at_once(self, tensors: Tensors, options: Any) -> Work | None:
        """A short way for the most frequent call: in a small one, everything else costs more."""
        tensor, exchange, segment = tensors[0], self.exchange, self.segment
        if not (options.reduceOp == Op.SUM and len(tensors) == 1 and tensor.is_cpu):
            return None
        dtype = fast.NUMBER_OF_DTYPE.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return None
        if not exchange.in_c or not pending.lock_if_free(segment):
            return None
        call = self.number_of_sum[dtype] + number_of_size(tensor.numel())
        waits = not options.asyncOp
        looks = exchange.many_looks if waits else exchange.looks
        try:
            late = exchange.begin_sum(tensor, dtype, call, looks)
        except BaseException as interrupt:
            segment.give_up_if_interrupted(interrupt)
            raise
        finally:
            pending.lock.release()
        if late == fast.DONE:
            completed = Completed()
            completed.outputs = tensors
            return completed
        work = Work(segment, exchange.end_sum(call, late), tensors)
        work.limit = limit_of(options) or work.limit
        return pending.start(self.collectives, work, waits)

    def all_reduce_steps(self, tensors: Tensors, op: Op, root: int | None = None) -> Steps:
        """With a root, it is a reduce: the other ranks keep what they have."""
        name = "all_reduce" if root is None else "reduce"
        for tensor in tensors:
            if tensor.layout == torch.sparse_coo:
                yield from self.sparse_all_reduce_steps(tensor, op)
            else:
                values = flat(tensor)
                call = number_of_call(name, values.numel(), values.dtype, root, op)
                yield from self.exchange.all_reduce(values, op, call, root)
                put_back(tensor, values)

    def sparse_all_reduce_steps(self, tensor: Tensor, op: Op) -> Steps:
        if op != Op.SUM:
            raise ValueError(f"shm: got {op} of a sparse tensor, expected SUM")
        own = without_autograd(tensor).coalesce()
        call = number_of_call("sparse all_reduce", own.numel(), own.dtype)
        shape = own.values().shape[1:]  # of what stands at one index
        indices = yield from self.exchange.gather_uneven(own.indices().t().reshape(-1), call)
        values = yield from self.exchange.gather_uneven(own.values().reshape(-1), call)
        total = torch.zeros_like(own)
        for places, numbers in zip(indices, values, strict=True):
            places = places.view(-1, own.sparse_dim()).t()
            part = numbers.view(places.shape[1], *shape)
            total = total + torch.sparse_coo_tensor(places, part, own.shape)
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    def reduce(self, tensors: Tensors, options: Any) -> Work:
        op = op_of(options, tensors)
        steps = self.all_reduce_steps(tensors, op, options.rootRank)
        return self.start(steps, tensors, options)

    def broadcast(self, tensors: Tensors, options: Any) -> Work:
        return self.start(self.broadcast_steps(tensors, options.rootRank), tensors, options)

    def broadcast_steps(self, tensors: Tensors, root: int) -> Steps:
        for tensor in tensors:
            values = flat(tensor)
            call = number_of_call("broadcast", len(values), values.dtype, root)
            yield from self.exchange.gather(values, {root: values}, call, source=root)
            put_back(tensor, values)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Work:
        return self.start(self.gather_steps(outputs[0], inputs[0]), outputs, options)

    def gather_steps(self, targets: Tensors, tensor: Tensor, root: int | None = None) -> Steps:
        require_same_size(targets, tensor)
        values = [flat(target) for target in targets]
        name = "all_gather" if root is None else "gather"
        call = number_of_call(name, tensor.numel(), tensor.dtype, root)
        yield from self.exchange.gather(flat(tensor), dict(enumerate(values)), call)
        for target, value in zip(targets, values, strict=True):
            put_back(target, value)

    def coalesced_gather_steps(self, pairs: list[tuple[Tensors, Tensor]]) -> Steps:
        for targets, tensor in pairs:
            yield from self.gather_steps(targets, tensor)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, options: Any = None
    ) -> Work:
        pairs = list(zip(map(list, zip(*outputs, strict=True)), inputs, strict=True))
        return self.start(self.coalesced_gather_steps(pairs), outputs, options)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], options)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any = None
    ) -> Work:
        pairs = [
            (equal_parts(output, self.size()), each)
            for output, each in zip(outputs, inputs, strict=True)
        ]
        return self.start(self.coalesced_gather_steps(pairs), outputs, options)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Work:
        targets = outputs[0] if outputs else []
        return self.start(self.gather_steps(targets, inputs[0], options.rootRank), outputs, options)

    def gather_single(self, output: Tensor, tensor: Tensor, options: Any) -> Work:
        is_root = options.rootRank == self.rank()
        return self.gather([equal_parts(output, self.size())] if is_root else [], [tensor], options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        parts = inputs[0] if inputs else []
        return self.start(self.scatter_steps(outputs[0], parts, options.rootRank), outputs, options)

    def scatter_steps(self, output: Tensor, inputs: Tensors, root: int) -> Steps:
        require_same_size(inputs, output)
        parts, values = [flat(each) for each in inputs], flat(output)
        call = number_of_call("scatter", len(values), values.dtype, root)
        yield from self.exchange.scatter(parts, values, root, call)
        put_back(output, values)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any = None) -> Work:
        op = op_of(options, outputs)
        return self.start(
            self.reduce_scatter_steps([(outputs[0], inputs[0])], op), outputs, options
        )

    def reduce_scatter_steps(self, pairs: list[tuple[Tensor, Tensors]], op: Op) -> Steps:
        for output, inputs in pairs:
            require_same_size(inputs, output)
            parts, values = [flat(each) for each in inputs], flat(output)
            call = number_of_call("reduce_scatter", len(values), values.dtype, op=op)
            yield from self.exchange.reduce_scatter(parts, values, op, call)
            put_back(output, values)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any = None
    ) -> Work:
        op = op_of(options, outputs)
        pairs = [
            (output, equal_parts(each, self.size()))
            for output, each in zip(outputs, inputs, strict=True)
        ]
        return self.start(self.reduce_scatter_steps(pairs, op), outputs, options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        return self.start(self.all_to_all_steps(outputs, inputs), outputs, options)

    def all_to_all_steps(self, outputs: Tensors, inputs: Tensors) -> Steps:
        values = [flat(output) for output in outputs]
        call = number_of_call("all_to_all", dtype=inputs[0].dtype)
        yield from self.exchange.all_to_all([flat(each) for each in inputs], values, call)
        for output, value in zip(outputs, values, strict=True):
            put_back(output, value)

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

    def barrier(self, opts: Any = None) -> Work:
        steps = self.exchange.all_reduce(torch.zeros(0), Op.SUM, number_of_call("barrier"))
        return self.start(steps, [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        limit = self.segment.limit if timeout is None else timeout
        self.monitored.meet(limit, wait_all_ranks)

    # Messages between two ranks

    def send(self, tensors: Tensors, rank: int, tag: int) -> Work:
        content = without_gaps(flat(tensors[0])).view(torch.uint8)
        work = Work(self.segment, self.messages.send(content, rank, tag), tensors)
        return self.start_message(self.messages.outgoing[rank], work)

    def recv(self, tensors: Tensors, rank: int | None, tag: int) -> Work:
        strides = zip(tensors[0].stride(), tensors[0].shape, strict=True)
        if any(stride == 0 and size > 1 for stride, size in strides):
            got = f"strides {tensors[0].stride()} of {tuple(tensors[0].shape)}"
            raise ValueError(f"shm: got {got}, expected memory for each element: try .contiguous()")
        work = Work(self.segment, self.receive_steps(tensors[0], rank, tag), tensors)
        return self.start_message(deque(), work)

    def start_message(self, queue: CallQueue, work: Work) -> Work:
        work.bell = MESSAGE_BELL
        work.spins = SPINS  # even with fewer cores than ranks: only two take part
        is_complete = pending.complete_at_once(work, wait=False)
        return work if is_complete else pending.start(queue, work, wait=False)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def receive_steps(self, tensor: Tensor, rank: int | None, tag: int) -> Steps:
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
        # None while torch makes the group: it would attach a recorder that only groups of C++ have
        return [torch.device("cpu")] if self in dist.distributed_c10d._world.pg_map else []

    def _get_backend(self, _: torch.device) -> dist.ProcessGroup:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.segment.limit = timeout

    def shutdown(self) -> None:
        self.segment.close()
        pending.poll()  # ends what still runs, with an error

    abort, allreduce_coalesced = shutdown, allreduce
    # The names of torch 2.11, and the other names of today's
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base, recvAnysource = all_to_all_single, recv_anysource  # noqa: N815
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single
