"""Which rank died? gloo only says that a connection was closed. Locks on a file name the rank.

    python 03_ddp_manual_allreduce/deaths.py

All ranks open one file without a name, and each locks one byte of it. The operating system releases
the lock of a process that ends, in whatever way it ends: a rank whose lock is free is dead. It also
removes the file with the last rank, so nothing can be left behind. Page: deaths.md
"""

import fcntl
import mmap
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
import torch.multiprocessing as mp

from common.options import Parser, UsageError
from ranks import end_with_parent, prepare_forkserver

LINE = 64  # bytes of a cache line: ranks that write to the same one slow each other down
ENDED = 0  # the counter that a rank sets if it ends without having died


def open_together(size: int) -> int:
    """Open one file of that many zero bytes on every rank; returns its descriptor.

    Raises UsageError on all ranks if one of them cannot see the file of rank 0.
    """
    shared, file = [f"ranks-{secrets.token_hex(8)}", ""], -1
    if dist.get_rank() == 0:
        if hasattr(os, "memfd_create"):  # Linux. /dev/shm would also do, but is small in containers
            file = os.memfd_create(shared[0])
            shared[1] = f"/proc/{os.getpid()}/fd/{file}"
        else:
            shared[1] = os.path.join(tempfile.gettempdir(), shared[0])
            file = os.open(shared[1], os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, size)
    dist.broadcast_object_list(shared, src=0)  # every rank must reach this line
    name, path = shared
    with suppress(OSError):
        if dist.get_rank() > 0 and name in os.path.realpath(path):  # false on another machine
            file = os.open(path, os.O_RDWR)
    opened = [False] * dist.get_world_size()
    dist.all_gather_object(opened, file >= 0)  # every rank must reach this line
    if dist.get_rank() == 0 and path.endswith(name):
        os.unlink(path)  # all ranks have opened it: it needs no name now
    if not all(opened):
        blind = [rank for rank, good in enumerate(opened) if not good]
        raise UsageError(f"ranks {blind} cannot see the memory of rank 0: run all on one machine")
    return file


class SharedFile:
    """A file in the memory of all ranks: counters and a lock for each, then `size` bytes."""

    def __init__(self, size: int = 0) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.offset = self.world_size * LINE  # the counters come first
        self.file = open_together(self.offset + size)
        self.memory = mmap.mmap(self.file, self.offset + size)
        self.counters = memoryview(self.memory)[: self.offset].cast("q")
        self.order = threading.Lock()
        fcntl.lockf(self.file, fcntl.LOCK_EX, 1, self.rank)  # a lock on one byte, the rank's own
        dist.barrier()  # all locks are taken; every rank must reach this line

    def post(self, counter: int, value: int) -> None:
        """Set a counter of this rank, visible after everything that this rank wrote before."""
        for _ in range(2):  # x86 keeps the order of writes. Elsewhere: release, then acquire
            with self.order:
                pass
        self.counters[self.rank * LINE // 8 + counter] = value

    def late(self, counter: int, value: int) -> list[int]:
        """The ranks whose counter is still below the value."""
        return [r for r in range(self.world_size) if self.counters[r * LINE // 8 + counter] < value]

    def dead(self) -> list[int]:
        """The ranks that died, except those that closed this or ended because of another rank."""
        found = []
        for rank in self.late(ENDED, 1):
            if rank != self.rank:
                with suppress(OSError):  # the rank is alive: it holds its lock
                    fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                    fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
                    found.append(rank)
        return found

    def require_alive(self) -> None:
        """Raise RuntimeError if a rank died. This rank then counts as ended because of it."""
        if dead := self.dead():
            self.post(ENDED, 1)
            raise RuntimeError(f"rank {dead[0]} died while rank {self.rank} waited for it")

    @contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """gloo's error says only that a connection closed. Raise one that names the rank."""
        try:
            yield
        except RuntimeError:
            for _ in range(200):  # a dying process closes its connections one after another
                self.require_alive()
                time.sleep(0.01)
            self.post(ENDED, 1)
            raise

    def close(self) -> None:
        """Release the file. Tensors in it stay valid."""
        if self.file >= 0:
            self.post(ENDED, 1)
            os.close(self.file)
            self.file = -1


def demonstrate(rank: int, port: int) -> None:
    """What each process does: rank 1 kills itself, and the others wait for it."""
    end_with_parent()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    shared = SharedFile()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with shared.naming_the_dead():
            dist.barrier()
    except RuntimeError as error:
        store.set(f"error {rank}", str(error))


def main() -> None:
    prepare_forkserver()
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    ranks = mp.start_processes(demonstrate, (store.port,), 3, join=False, start_method="forkserver")
    for rank, process in enumerate(ranks.processes):
        process.join()
        died = process.exitcode == -signal.SIGKILL
        print(f"rank {rank}:", "killed" if died else store.get(f"error {rank}").decode())


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
