"""Memory that all ranks of a group share, and how a rank waits in it for the others.

It is a file without a name: nothing is left of it, in whatever way the ranks end. Each rank locks
one byte of it. The operating system releases the lock of a process that ends.
"""

import fcntl
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

LINE = 64  # bytes of a cache line: ranks that write to the same one slow each other down
ARRIVED, KIND = 0, 1  # counters of a rank: its arrivals; KIND and KIND + 1: their last two kinds
SPINS, NAP = 1000, 50e-6  # looks before a nap, and between checks that a rank lives; seconds


class Segment:
    """Counters in `lines` cache lines, those of the ranks first; then `size` bytes for tensors.

    Raises RuntimeError if ranks are on two machines or one has ended, TimeoutError if one is late.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: int, lines: int, size: int, limit: timedelta
    ) -> None:
        self.rank, self.ranks, self.limit, self.offset = rank, ranks, limit, lines * LINE
        self.arrivals, self.failed, self.order = 0, "", threading.Lock()
        self.file = self.open_together(store, self.offset + size)
        self.memory = mmap.mmap(self.file, self.offset + size)
        self.counters = memoryview(self.memory)[: self.offset].cast("q")
        self.places = [each * LINE // 8 for each in range(ranks)]
        self.progress: Callable[[], None] = lambda: None  # other work during a wait

    def open_together(self, store: dist.Store, size: int) -> int:
        """Open and lock one file of that many bytes on every rank; returns its descriptor."""
        if sys.platform != "linux":
            raise RuntimeError(f"shm: got {sys.platform}, expected Linux: try gloo")
        turn, file = store.add(f"turn {self.rank}", 1), -1  # a store may be used twice
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if self.rank == 0:
            file = os.memfd_create("shm")
            os.fchmod(file, 0o600)
            os.ftruncate(file, size)
            store.set(f"place {turn}", f"{machine} /proc/{os.getpid()}/fd/{file}")
        store.wait([f"place {turn}"], self.limit)
        where, path = store.get(f"place {turn}").decode().split()
        if self.rank > 0 and where == machine:
            with suppress(OSError):  # of another user, or in another container
                file = os.open(path, os.O_RDWR)
        if file >= 0:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, self.rank)
        told = [f"opened {turn} {rank}" for rank in range(self.ranks)]
        store.set(told[self.rank], str(file >= 0))
        store.wait(told, self.limit)
        if blind := [rank for rank, key in enumerate(told) if store.get(key) != b"True"]:
            what = f"ranks {blind} cannot open the memory of rank 0"
            raise RuntimeError(f"shm: {what}, expected one machine and one user: try gloo")
        return file

    def tensor(self, start: int, size: int) -> Tensor:
        """Shared bytes as a tensor of torch.uint8."""
        place = self.offset + start
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=place)

    def post(self, place: int, value: int) -> None:
        """Set a counter, visible after everything that this rank wrote before."""
        for _ in range(2):  # x86 keeps the order of writes. Elsewhere: release, then acquire
            with self.order:
                pass
        self.counters[place] = value

    def arrive(self, kind: int) -> None:
        """Tell that this rank has written its part of `kind`, and wait until all ranks have."""
        if self.failed:
            raise RuntimeError(self.failed)
        self.arrivals = arrivals = self.arrivals + 1
        counters, told = self.counters, KIND + arrivals % 2  # a rank may be one arrival ahead
        counters[self.places[self.rank] + told] = kind
        self.post(self.places[self.rank] + ARRIVED, arrivals)
        for rank, place in enumerate(self.places):
            if counters[place + ARRIVED] < arrivals:
                self.wait(rank, lambda place=place: counters[place + ARRIVED] >= arrivals)
            with self.order:  # what it wrote before it arrived is visible now
                pass
            if counters[place + told] != kind:
                self.fail(f"rank {rank} has called another collective, or with another size")

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Wait until ready(). The errors name this rank."""
        looks, deadline = 0, time.monotonic() + self.limit.total_seconds()
        while not ready():
            looks += 1
            if looks % SPINS == 0:
                if not self.lives(rank) and not ready():
                    self.fail(f"rank {rank} has ended while rank {self.rank} waits for it")
                if time.monotonic() > deadline:
                    self.fail(f"rank {rank} is more than {self.limit} late", TimeoutError)
            if looks < SPINS:
                os.sched_yield()  # nothing, unless there are more ranks than cores
            else:
                self.progress()
                time.sleep(NAP)

    def lives(self, rank: int) -> bool:
        with suppress(OSError):  # it is alive: it holds its lock
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
            return rank == self.rank
        return True

    def fail(self, text: str, error: type[Exception] = RuntimeError) -> None:
        """Raise this now and at each later use: the ranks are no longer at the same call."""
        self.failed = f"shm: {text}"
        raise error(self.failed)

    def close(self) -> None:
        """Tell the others that this rank has ended. Tensors in the memory stay valid."""
        if self.file >= 0:
            os.close(self.file)
            self.file, self.failed = -1, "shm: the group was destroyed"
