"""A backend of torch.distributed for ranks on one machine: they share memory and send nothing.

    import shm
    torch.distributed.init_process_group("shm")

This is the process group that torch calls. A collective is complete when its call returns.
Page: 03_ddp_manual_allreduce/backend.md
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from shm.exchange import COMBINE, DTYPES, ROW, Exchange, Op
from shm.messages import BOX, Message, Messages
from shm.segment import Segment

Tensors = list[Tensor]  # of one tensor: torch once had one for each device of a process


def done(result: object) -> dist.Work:
    future: Future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def flat(tensor: Tensor) -> Tensor:
    """All elements, (N,): a view where that is possible, else a copy."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        got = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise TypeError(f"shm: got a tensor of {got}, expected a dense one on the CPU: try gloo")
    return tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)


def put_back(tensor: Tensor, values: Tensor) -> None:
    if not tensor.is_contiguous():  # `flat` had to copy it
        tensor.copy_(values.view_as(tensor))


def op_of(options: Any, tensor: Tensor) -> Op:
    op, what = options.reduceOp.op, "SUM, PRODUCT, MIN or MAX, or AVG of floats"
    if op not in COMBINE or (op == Op.AVG and not tensor.is_floating_point()):
        raise ValueError(f"shm: got {op} of {tensor.dtype}, expected {what}")
    return op


class SharedMemoryGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        lines, rows = size + 2 * size * size, 2 * size * ROW
        self.segment = Segment(store, rank, size, lines, rows + size * size * BOX, timeout)
        self.exchange = Exchange(self.segment)
        self.messages = Messages(self.segment, size, rows)

    def getBackendName(self) -> str:  # noqa: N802
        return "shm"

    def _get_backend(self, _: torch.device) -> dist.ProcessGroup:
        return self

    def allreduce(self, tensors: Tensors, options: Any) -> dist.Work:
        for tensor in tensors:
            values = flat(tensor)
            self.exchange.all_reduce(values, op_of(options, tensor))
            put_back(tensor, values)
        return done(tensors)

    def reduce(self, tensors: Tensors, options: Any) -> dist.Work:
        kept = tensors if options.rootRank == self.rank() else [tensors[0].clone()]
        return self.allreduce(kept, options)

    def broadcast(self, tensors: Tensors, options: Any) -> dist.Work:
        values, root = flat(tensors[0]), options.rootRank
        self.exchange.gather(values, {root: values}, root)
        put_back(tensors[0], values)
        return done(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, _: Any = None) -> dist.Work:
        self.collect(outputs[0], inputs[0])
        return done(outputs)

    def collect(self, targets: Tensors, tensor: Tensor, root: int = -1) -> None:
        values = [flat(target) for target in targets]
        self.exchange.gather(flat(tensor), dict(enumerate(values)), root)
        for target, value in zip(targets, values, strict=True):
            put_back(target, value)

    def all_gather_single(self, output: Tensor, tensor: Tensor, _: Any) -> dist.Work:
        return self.allgather([list(output.view(self.size(), *tensor.shape))], [tensor])

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> dist.Work:
        self.collect(outputs[0] if outputs else [], inputs[0], options.rootRank)
        return done(outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> dist.Work:
        whole = torch.stack(inputs[0] if inputs else outputs * self.size())  # (ranks, ...)
        self.broadcast([whole], options)
        outputs[0].copy_(whole[self.rank()])
        return done(outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> dist.Work:
        whole = torch.stack(inputs[0])  # (ranks, ...)
        self.allreduce([whole], options)
        outputs[0].copy_(whole[self.rank()])
        return done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any) -> dist.Work:
        return self.reduce_scatter([output], [list(tensor.chunk(self.size()))], options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, _: Any = None) -> dist.Work:
        longest = torch.tensor([max(each.numel() for each in inputs)])
        self.exchange.all_reduce(longest, Op.MAX)
        padded = [F.pad(flat(each), (0, int(longest) - each.numel())) for each in inputs]
        mine = torch.stack(padded)  # a row for each rank
        found = mine.new_empty(self.size(), *mine.shape)
        self.collect(list(found), mine)
        for rows, output in zip(found, outputs, strict=True):
            output.copy_(rows[self.rank(), : output.numel()].view_as(output))
        return done(outputs)

    def all_to_all_single(self, out: Tensor, x: Tensor, outs: list, ins: list, _: Any) -> dist.Work:
        outputs = out.split(outs or len(out) // self.size())  # outs, ins: sizes
        return self.alltoall(list(outputs), list(x.split(ins or len(x) // self.size())))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(0)], dist.AllreduceOptions())

    def send(self, tensors: Tensors, rank: int, tag: int) -> Message:
        return self.messages.start(flat(tensors[0]).view(torch.uint8), self.rank(), rank)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Message:
        return self.messages.start(tensors[0].view(-1).view(torch.uint8), rank, self.rank())

    def shutdown(self) -> None:
        self.segment.close()

    abort, allreduce_coalesced = shutdown, allreduce
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single  # these three are the names of torch 2.11


dist.Backend.register_backend("shm", SharedMemoryGroup, devices=["cpu"])
