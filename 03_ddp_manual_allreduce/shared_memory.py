"""Memory that all ranks of one machine see, and locks that tell which of them died.

    python 03_ddp_manual_allreduce/shared_memory.py

The memory is a file without a name. The operating system takes it back when the last rank has
ended, in whatever way it ended: nothing can be left behind.
"""

import fcntl
import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from common.options import Parser, UsageError

from ranks import start

LINE = 64  # bytes of a cache line: ranks that write to the same one slow each other down
READY, DONE, ENDED = range(3)  # the counters of each rank


def open_together(size: int) -> int:
    """Open one file of that many zero bytes on every rank; returns its descriptor.

    Raises UsageError on all ranks where one of them cannot see the file of rank 0.
    """
    shared, file = [f"ranks-{secrets.token_hex(8)}", ""], -1
    if dist.get_rank() == 0:
        if hasattr(os, "memfd_create"):  # Linux; /dev/shm would do too, but is small in containers
            file = os.memfd_create(shared[0])
            shared[1] = f"/proc/{os.getpid()}/fd/{file}"
        else:
            shared[1] = os.path.join(tempfile.gettempdir(), shared[0])
            file = os.open(shared[1], os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, size)
    dist.broadcast_object_list(shared, src=0)  # every rank must reach this line
    name, path = shared
    with suppress(OSError):
        if dist.get_rank() > 0 and name in os.path.realpath(path):  # on another machine it is not
            file = os.open(path, os.O_RDWR)
    opened = [False] * dist.get_world_size()
    dist.all_gather_object(opened, file >= 0)  # every rank must reach this line
    if dist.get_rank() == 0 and path.endswith(name):
        os.unlink(path)  # all have it open: it needs no name any more
    if not all(opened):
        blind = [rank for rank, good in enumerate(opened) if not good]
        raise UsageError(f"ranks {blind} cannot see the memory of rank 0: run all on one machine")
    return file


class Segment:
    """Bytes that all ranks share, counters of each, and a lock of each that its death opens.

    seconds: how long `wait` waits for a rank that is late but lives.
    """

    def __init__(self, size: int = 0, seconds: float = 300) -> None:
        self.rank, self.world_size, self.seconds = dist.get_rank(), dist.get_world_size(), seconds
        self.offset = self.world_size * LINE  # the counters come first
        self.file = open_together(self.offset + size)
        self.memory = mmap.mmap(self.file, self.offset + size)
        self.counters = memoryview(self.memory)[: self.offset].cast("q")
        self.order = threading.Lock()
        fcntl.lockf(self.file, fcntl.LOCK_EX, 1, self.rank)  # a lock on one byte, the rank's own
        dist.barrier()  # all locks are taken; every rank must reach this line

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        """Shared bytes as a tensor; offset: where it begins, in bytes."""
        count = torch.Size(shape).numel()
        place = self.offset + offset
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=place).view(shape)

    def post(self, counter: int, value: int) -> None:
        """Set a counter of this rank, to be seen after all that this rank wrote before."""
        for _ in range(2):  # x86 keeps the order of writes. Elsewhere: release, then acquire
            with self.order:
                pass
        self.counters[self.rank * LINE // 8 + counter] = value

    def late(self, counter: int, value: int) -> list[int]:
        """The ranks whose counter is still below the value."""
        return [r for r in range(self.world_size) if self.counters[r * LINE // 8 + counter] < value]

    def wait(self, counter: int, value: int) -> None:
        """Wait for the counters of all ranks; an error names those that died or are late."""
        deadline, looks = time.monotonic() + self.seconds, 0
        while late := self.late(counter, value):
            os.sched_yield()  # nothing, unless there are more ranks than cores
            looks += 1
            if looks % 1000 == 0:  # every millisecond or so
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

    def dead(self) -> list[int]:
        """The ranks that died, without those that ended because of another or closed this."""
        found = []
        for rank in self.late(ENDED, 1):
            if rank != self.rank:
                with suppress(OSError):  # somebody holds the lock
                    fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                    fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
                    found.append(rank)
        return found

    def require_alive(self) -> None:
        """Raise RuntimeError if a rank died. This rank then ends too, but is not the cause."""
        if dead := self.dead():
            self.post(ENDED, 1)
            raise RuntimeError(f"rank {dead[0]} died while rank {self.rank} waited for it")

    @contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """gloo's error tells that a connection closed; this adds whose rank it was."""
        try:
            yield
        except RuntimeError:
            for _ in range(200):  # a dying process closes its connections one after another
                self.require_alive()
                time.sleep(0.01)
            self.post(ENDED, 1)
            raise

    def close(self) -> None:
        """Let go of it. The tensors keep their bytes as long as they live."""
        if self.file >= 0:
            self.post(ENDED, 1)
            os.close(self.file)
            self.file = -1


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
