"""A backend of torch.distributed by hand: everything that DDP needs, without a message.

    python 03_ddp_manual_allreduce/backend.py

The package shm is this idea made complete, and faster than gloo. Page: backend.md
"""

import mmap
import os
import sys
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.models import Net
from common.options import Parser, UsageError, exit_on
from local_ranks.ranks import run_ranks

RANKS, STEPS = 2, 4
LINE_BYTES, ROW_BYTES = 64, 2**20  # of a counter, and of the longest tensor; shm cuts longer ones


class SharedRows(dist.ProcessGroup):
    """Each rank writes its tensor into a row that all ranks see, and reads the rows of the others.

    A rank counts the rows that it has written. When all counters are equal, all rows are complete.
    The next tensor goes to the other slot, because the slowest rank may still read this one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        if rank == 0:
            self.file = os.memfd_create("rows")  # without a name: removed with the last rank
            os.ftruncate(self.file, size * LINE_BYTES + 2 * size * ROW_BYTES)
            store.set("file", f"/proc/{os.getpid()}/fd/{self.file}")
        with open(store.get("file"), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        counters = torch.frombuffer(memory, dtype=torch.int64, count=size * LINE_BYTES // 8)
        self.written = counters.view(size, -1)[:, 0]  # rows, by each rank
        rows = torch.frombuffer(memory, dtype=torch.uint8, offset=size * LINE_BYTES)
        self.slots, self.calls = rows.view(2, size, ROW_BYTES), Counter[str]()

    def exchange_rows(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, (ranks, N), as soon as all have called this."""
        turn = int(self.written[self.rank()]) + 1
        rows = self.slots[turn % 2, :, : tensor.nbytes].view(tensor.dtype)
        rows[self.rank()] = tensor.flatten()
        self.written[self.rank()] = turn
        while self.written.min() < turn:
            os.sched_yield()  # lets another rank use the core
        return rows

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        if options.reduceOp != dist.ReduceOp.SUM:  # DDP divides before it adds
            raise ValueError(f"rows: got {options.reduceOp.op}, expected SUM: try the package shm")
        for tensor in tensors:
            tensor.copy_(self.exchange_rows(tensor).sum(dim=0).view_as(tensor))
        return self.completed("allreduce", tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        for tensor in tensors:
            tensor.copy_(self.exchange_rows(tensor)[options.rootRank].view_as(tensor))
        return self.completed("broadcast", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any) -> dist.Work:
        for output, row in zip(outputs[0], self.exchange_rows(inputs[0]), strict=True):
            output.copy_(row.view_as(output))
        return self.completed("allgather", outputs)

    def completed(self, name: str, result: Any) -> dist.Work:
        """Count the call, and return work that is already complete."""
        self.calls[name] += 1
        future: Future = Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def getBackendName(self) -> str:  # noqa: N802
        return "rows"


def train(backend: str) -> tuple[list[Counter], Tensor]:
    """Train under DDP over this backend: calls before the first step, at the end; weights."""
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    model = Net(1, 28, 10, batch_norm=True)
    ddp = DistributedDataParallel(model, process_group=group)
    calls = [Counter(getattr(group, "calls", {}))]
    torch.manual_seed(dist.get_rank())
    images, labels = torch.randn(60, 1, 28, 28), torch.arange(60) % 10
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    calls.append(Counter(getattr(group, "calls", {})))
    return calls, torch.cat([p.detach().flatten() for p in model.parameters()])


def compare(rank: int) -> tuple[list[tuple], bool]:
    """DDP's calls by name, before the first step and in all; does it train to the bits of gloo?"""
    dist.Backend.register_backend("rows", SharedRows, devices=["cpu"])
    (before, after), rows_weights = train("rows")
    _, gloo_weights = train("gloo")
    calls = [(name, before[name], after[name] - before[name]) for name in after]
    return calls, torch.equal(rows_weights, gloo_weights)


def main() -> None:
    Parser(__doc__).parse_args()
    if sys.platform != "linux":
        raise UsageError(f"got {sys.platform}, expected Linux: it has files without a name")
    (calls, equals_gloo), *_ = run_ranks(RANKS, compare)
    print(tabulate(calls, ("DDP calls", "when it is made", f"in {STEPS} steps")))
    weights = "the same bits as" if equals_gloo else "other weights than"
    print(f"over rows: {weights} over gloo")


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
