"""An all-reduce without messages: all ranks of a machine see the same memory.

    python 03_ddp_manual_allreduce/shared_memory.py

Each rank copies its gradients into a row that the others can read, and adds up its slice of all
rows. Counters tell when all rows are there, and when all slices are summed.
"""

import os
import time
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from buckets import Bucket, length
from common.options import Parser, UsageError
from deaths import ENDED, LINE, SharedFile
from flat import Flat
from overlap import Bucketed
from ranks import start

READY, DONE = ENDED + 1, ENDED + 2  # counters: steps with complete rows, with summed slices


class Segment(SharedFile):
    """Bytes that all ranks share as tensors, and counters by which they wait for each other.

    seconds: how long `wait` waits for a rank that is late but alive.
    """

    def __init__(self, size: int = 0, seconds: float = 300) -> None:
        super().__init__(size)
        self.seconds = seconds

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        """Shared bytes as a tensor. offset: its first byte."""
        count = torch.Size(shape).numel()
        place = self.offset + offset
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=place).view(shape)

    def wait(self, counter: int, value: int) -> None:
        """Wait for the counters of all ranks; an error names those that died or are late."""
        deadline, looks = time.monotonic() + self.seconds, 0
        while late := self.late(counter, value):
            os.sched_yield()  # only matters with more ranks than cores
            looks += 1
            if looks % 1000 == 0:  # about every millisecond
                self.require_alive()
                ended = set(range(self.world_size)).difference(self.late(ENDED, 1))
                if gone := sorted(ended.intersection(self.late(counter, value))):
                    self.post(ENDED, 1)
                    raise RuntimeError(f"ranks {gone} ended while rank {self.rank} waited for them")
                if time.monotonic() > deadline:
                    self.post(ENDED, 1)
                    raise TimeoutError(f"ranks {late} are more than {self.seconds} s late")
        with self.order:
            pass


class SharedMemory(Bucketed):
    """For one machine: each rank adds up its slice of all ranks' gradients. Nothing is sent.

    Gradients are copied to the shared memory during backward, while they are still in the
    processor's cache.
    """

    shared: Segment
    plan = Flat.plan  # no need to send early where nothing is sent
    PIECE = 2**16  # elements that are added up at a time: they stay in the cache

    def __init__(self, model: nn.Module) -> None:
        if any(p.device.type != "cpu" for p in model.parameters()):
            raise UsageError("shared-memory needs gradients on the CPU: try bucketed")
        super().__init__(model)

    def open_shared(self) -> Segment:
        return Segment(sum(row_bytes(group) for group in self.plan()) * self.world_size)

    def make_buckets(self, plan: list[list[Parameter]]) -> list[Bucket]:
        rank = dist.get_rank()
        self.slices, self.steps, buckets, offset = [], 0, [], 0
        for group in plan:
            shape = (self.world_size, row_bytes(group) // group[0].element_size())
            rows = self.shared.tensor(group[0].dtype, shape, offset)  # a row for each rank
            self.slices += rows.tensor_split(self.world_size, dim=1)[rank].split(self.PIECE, dim=1)
            buckets.append(Bucket(group, rows[rank, : length(group)]))
            offset += row_bytes(group) * self.world_size
        return buckets

    def send_full_buckets(self) -> None:
        """Nothing is sent."""

    def all_reduce(self) -> None:
        self.steps += 1
        self.shared.post(READY, self.steps)
        self.shared.wait(READY, self.steps)  # all gradients are there
        for rows in self.slices:  # (world size, elements)
            rows[:] = reduce(torch.add, rows.unbind())
        self.shared.post(DONE, self.steps)
        self.shared.wait(DONE, self.steps)  # all slices are summed: each may change its own row


def row_bytes(group: list[Parameter]) -> int:
    """The bytes of a bucket, rounded up to whole cache lines."""
    return -(-length(group) * group[0].element_size() // LINE) * LINE


def add_up() -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    segment = Segment(8 * world_size)
    numbers = segment.tensor(torch.int64, (world_size,), offset=0)  # one of each rank
    numbers[rank] = 10**rank
    segment.post(READY, 1)
    segment.wait(READY, 1)
    return f"rank {rank} wrote {10**rank} and sees {numbers.tolist()}, in all {numbers.sum()}"


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    print(*start(3, add_up), sep="\n")
