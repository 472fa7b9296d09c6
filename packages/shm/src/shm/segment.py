"""Memory that all ranks of a group share: counters, room for tensors, and who is still alive.

It is a file without a name: nothing is left of it, in whatever way the ranks end. Each rank locks
one byte of it. The operating system releases the lock of a process that ends.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shm.calls import decode_call, encode_call

CACHE_LINE_BYTES = 64  # ranks that write to the same cache line slow each other down
COUNTERS_PER_CACHE_LINE = CACHE_LINE_BYTES // 8
# Counters of a rank, which only this file and fast.c write
ARRIVED = 0  # how often the rank has arrived, or NEVER
CALL, TRANSFER = 1, 3  # two counters each, for the last two arrivals
BELL, MESSAGE_BELL = 8, 10  # rung when the rank arrives, or sends or receives a piece of a message
ASLEEP = 1  # the counter behind a bell: does anybody sleep until the bell rings?
CACHE_LINES_PER_RANK = 2

NEVER = 2**62  # in ARRIVED of a rank that has failed, so that nobody waits for it any more
FAILED, ENDED, LATE = -1, -2, -3  # what such a rank announces instead of a call, see Cause
TEXT_OF_CAUSE = {FAILED: "has failed", ENDED: "has ended", LATE: "was late"}

# Polls before a waiting rank sleeps: each yields the core, so it pays even where ranks share one,
# because waking up takes longer than most waits
SPINS = 100

# A call, as a generator that yields the ranks it waits for and returns a source rank or None
CallSteps = Generator[list[int], None, Any]


def memory_fence() -> Callable[[], None]:
    """Return what keeps writes to the shared memory, and reads of it, in the program's order.

    A rank writes its data and then its counter, another reads that counter and then the data. Both
    rely on an order that not every processor keeps:

    - x86 keeps it. Writes are not reordered with other writes, nor with older reads, and reads not
      with other reads (Intel SDM, volume 3A, "Memory Ordering in P6 and More Recent Processor
      Families"). It names two exceptions: string stores are unordered among themselves, but not
      with the counter that is written after them; and non-temporal stores need a fence, which
      memcpy of the C library and `put` in fast.c execute behind theirs. So nothing is to be done.
    - ARM and RISC-V may reorder all of them, and Python has no fence: a lock of this process orders
      nothing for another process, which never takes it. Linux has membarrier(2): when it returns,
      every running thread of the registered processes has passed a full barrier, so the accesses
      before and after it are ordered on both sides, and the rank that reads needs none of its own
      (man 2 membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED). It is called between data and counter.
      fast.c needs no call: C writes a counter with release and reads it with acquire.
    """
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return lambda: None
    return system_fence({"aarch64": 283, "riscv64": 283}.get(machine))


def futex() -> Callable[..., int]:
    """Return futex(2), which sleeps until a number in the memory changes, or wakes the sleepers."""
    number = 202 if platform.machine() in ("x86_64", "AMD64") else 98
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    return partial(call, number)


WAIT, WAKE, ALL = 0, 1, 2**31 - 1  # FUTEX_WAIT, FUTEX_WAKE, and how many to wake


def system_fence(number: int | None) -> Callable[[], None]:
    """Return membarrier(2), which has this number on this processor's Linux."""
    everywhere, register = 1 << 1, 1 << 2  # MEMBARRIER_CMD_(REGISTER_)GLOBAL_EXPEDITED
    call = ctypes.CDLL(None, use_errno=True).syscall
    if number is None or call(number, register, 0, 0) != 0:
        what = f"{platform.machine()} without membarrier(2)"
        raise SharingError(f"shm: got {what}, expected x86-64, or Linux on ARM: try gloo")
    return lambda: call(number, everywhere, 0, 0)


def identity_of_file(file: int) -> str:
    """Return device, inode and name of an open file; the shared memory has a random name."""
    status = os.fstat(file)
    return f"{status.st_dev} {status.st_ino} {os.readlink(f'/proc/self/fd/{file}')}"


def open_if_identical(path: str, identity: str) -> int:
    """Open a file for reading and writing; return -1, and leave it untouched, if it is another.

    Containers count their processes each from 1, so what rank 0 calls /proc/1/fd/9 may be a
    document of the user for another rank.
    """
    descriptor = os.open(path, os.O_PATH)  # tells which file it is, without opening it
    try:
        is_identical = identity_of_file(descriptor) == identity
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR) if is_identical else -1
    finally:
        os.close(descriptor)


class Cause(NamedTuple):
    """The announcement of a rank that has failed, in place of its call and its transfer.

    kind: FAILED, ENDED or LATE. rank: the announcing rank itself if it has FAILED, or the one that
    has ENDED or was too LATE for it.
    """

    kind: int
    rank: int


MEMORY_KEY = "memory of rank 0"  # in the store: machine, path and identity of the shared file


class SharingError(RuntimeError):
    """The ranks share no memory. The text says in one line why, and what to try."""


class Segment:
    """The memory of one group: counters in `cache_lines`, and then `size` bytes for tensors.

    The first counters are those of the ranks. Barriers and messages get others by `counters_in`,
    and each set of counters has one file that writes it.
    Raises SharingError if ranks are on two machines or in two containers, or one has ended.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        cache_lines: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.tensor_offset = cache_lines * CACHE_LINE_BYTES
        self.arrivals = 0
        self.transfers = 0  # how many calls, or parts of calls, have exchanged data
        self.failure: RuntimeError | None = None  # why this rank takes part in no further call
        self.file = self.open_together(store, self.tensor_offset + size)
        self.memory = mmap.mmap(self.file, self.tensor_offset + size)
        self.counters = self.counters_in(0, CACHE_LINES_PER_RANK * world_size)
        width = CACHE_LINES_PER_RANK * COUNTERS_PER_CACHE_LINE
        self.counter_offsets = [rank * width for rank in range(world_size)]
        self.own_offset = self.counter_offsets[rank]
        self.last_rings: dict[int, int] = {}  # bells as this rank last saw them, by index
        self.futex, self.address = futex(), self.tensor(-self.tensor_offset, 1).data_ptr()
        self.offsets_of_others = [
            each for each in enumerate(self.counter_offsets) if each[0] != rank
        ]
        self.meet()
        if rank == 0:  # nobody reads these keys any more, and another group may use this store
            for key in (MEMORY_KEY, *self.keys_of_ranks()):
                store.delete_key(key)
        self.meet()

    def keys_of_ranks(self) -> list[str]:
        """Return the keys in the store under which each rank says whether it opened the memory."""
        return [f"opened {rank}" for rank in range(self.world_size)]

    def open_together(self, store: dist.Store, size: int) -> int:
        """Open and lock one file of that many bytes on every rank; return its descriptor."""
        if sys.platform != "linux":
            raise SharingError(f"shm: got {sys.platform}, expected Linux: try gloo")
        self.fence = memory_fence()
        machine, file = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), -1
        if self.rank == 0:
            file = os.memfd_create(f"shm-{token_hex(8)}")
            os.fchmod(file, 0o600)
            os.ftruncate(file, size)
            path = f"/proc/{os.getpid()}/fd/{file}"
            store.set(MEMORY_KEY, "\n".join([machine, path, identity_of_file(file)]))
        store.wait([MEMORY_KEY], self.timeout)
        where, path, identity = store.get(MEMORY_KEY).decode().split("\n")
        if self.rank > 0 and where == machine:
            with suppress(OSError):  # the file belongs to another user
                file = open_if_identical(path, identity)
        if file >= 0:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, self.rank)
        opened = self.keys_of_ranks()
        store.set(opened[self.rank], str(file >= 0))
        store.wait(opened, self.timeout)
        if without_memory := [rank for rank, key in enumerate(opened) if store.get(key) != b"True"]:
            what = f"ranks {without_memory} cannot open the memory of rank 0"
            raise SharingError(f"shm: {what}, expected one machine, container and user: try gloo")
        return file

    def tensor(self, start: int, size: int) -> Tensor:
        """Return shared bytes as a tensor of torch.uint8."""
        begin = self.tensor_offset + start
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=begin)

    def counters_in(self, cache_line: int, cache_lines: int) -> memoryview:
        """Return the counters in so many cache lines from that one on."""
        begin = cache_line * CACHE_LINE_BYTES
        end = begin + cache_lines * CACHE_LINE_BYTES
        return memoryview(self.memory)[begin:end].cast("q")

    def post(self, counters: memoryview, index: int, value: int, bell: int = BELL) -> None:
        """Set a counter, visible after everything that this rank has written and read, and ring.

        On machines without a fence a rank just falling asleep may miss the ring, and wakes a
        millisecond later.
        """
        self.fence()
        counters[index] = value  # eight aligned bytes, so nobody reads half of them
        counters, bell = self.counters, self.own_offset + bell
        counters[bell] += 1
        if counters[bell + ASLEEP]:
            counters[bell + ASLEEP] = 0
            self.futex(self.address + 8 * bell, WAKE, ALL, None)

    def sleep_until_bell(self, rank: int, bell: int, seconds: float) -> None:
        """Sleep until that rank rings, for so many seconds at most.

        Returns at once if the rank has rung since the last call. The caller must then poll again
        before it may sleep, because it may have polled before the ring.
        """
        counters, index = self.counters, self.counter_offsets[rank] + bell
        rung = counters[index]
        if self.last_rings.get(index) != rung:
            self.last_rings[index] = rung
            return
        counters[index + ASLEEP] = 1
        timespec = (ctypes.c_long * 2)(0, int(1e9 * seconds))  # seconds and nanoseconds
        self.futex(self.address + 8 * index, WAIT, rung % 2**32, ctypes.addressof(timespec))

    def arrive(self, call: int) -> CallSteps:
        """Say that this rank has written its part of `call`, and wait until all ranks have."""
        self.arrivals = arrivals = self.arrivals + 1
        counters = self.counters
        transfer = self.transfers
        own = self.own_offset
        call_counter = CALL + arrivals % 2  # two in turns, since a rank may be one arrival ahead
        transfer_counter = TRANSFER + arrivals % 2
        counters[own + call_counter] = call
        counters[own + transfer_counter] = transfer
        self.post(counters, own + ARRIVED, arrivals)
        for rank, offset in self.offsets_of_others:
            while counters[offset + ARRIVED] < arrivals:
                yield [rank]
            other_call = counters[offset + call_counter]
            other_transfer = counters[offset + transfer_counter]
            if other_call != call or other_transfer != transfer:
                self.fail_as_different(rank, call)

    def fail_as_different(self, rank: int, call: int) -> NoReturn:
        """Fail because the arrival of that rank is not the one that belongs to this call."""
        offset, odd, own = self.counter_offsets[rank], self.arrivals % 2, decode_call(call)
        other_call = self.counters[offset + CALL + odd]
        other_transfer = self.counters[offset + TRANSFER + odd]
        if other_call < 0:
            self.fail_after(rank, f"complete {own}")
        if other_call != call:
            what = f"rank {rank} has called {decode_call(other_call)}"
            self.fail(f"{what}, but rank {self.rank} {own}")
        what = f"rank {rank} is in transfer {other_transfer}, and rank {self.rank} in"
        self.fail(f"{what} {self.transfers}: an earlier call than this {own} was interrupted")

    def fail_after(self, rank: int, what: str) -> NoReturn:
        """Fail because that rank has failed, and name the rank where it began."""
        counters, offset = self.counters, self.counter_offsets[rank]
        odd = counters[offset + CALL] >= 0
        cause = Cause(counters[offset + CALL + odd], counters[offset + TRANSFER + odd])
        who = f"rank {cause.rank} {TEXT_OF_CAUSE[cause.kind]}"
        found = "" if cause.rank == rank else f", as rank {rank} has found"
        self.fail(f"{who}{found}, so rank {self.rank} cannot {what}", cause=cause)

    def meet(self) -> None:
        """Wait until all ranks are here. Raises SharingError if one of them does not come."""
        end = time.monotonic() + self.timeout.total_seconds()
        for [rank] in self.arrive(encode_call("barrier")):
            if time.monotonic() > end or not self.is_alive(rank):
                raise SharingError(f"shm: rank {rank} opened the memory, and did not come back")
            time.sleep(0.0005)

    def is_alive(self, rank: int) -> bool:
        """Tell whether that rank still holds its lock on a byte of the file."""
        if rank != self.rank and self.file >= 0:  # a rank that asked for its own lock would lose it
            with suppress(OSError):  # the lock is held, so the rank is alive
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
                return False
        return True

    def fail(
        self, text: str, error: type[Exception] = RuntimeError, cause: Cause | None = None
    ) -> NoReturn:
        """Raise an error now and at each later use: the ranks are no longer at the same call."""
        self.give_up(text, cause)
        assert self.failure is not None
        raise error(*self.failure.args)

    def give_up(self, text: str, cause: Cause | None = None) -> None:
        """Take part in no further call, and let the others see it instead of waiting.

        They see it at the first arrival that this rank has not completed, and not before.
        """
        if self.failure:
            return
        counters, own = self.counters, self.own_offset
        kind, rank = cause or Cause(FAILED, self.rank)
        arrivals = counters[own + ARRIVED]  # self.arrivals is one ahead if arrive() was cut off
        for _ in range(2):  # another rank may arrive between looking and announcing
            arrived = [counters[offset + ARRIVED] for offset in self.counter_offsets]
            all_here = min(arrived) >= arrivals
            odd = (arrivals + all_here) % 2
            counters[own + CALL + odd], counters[own + TRANSFER + odd] = kind, rank
        self.post(counters, own + ARRIVED, NEVER)
        self.failure = RuntimeError(f"shm: {text}")  # last, so that a cut-off give_up is repeated

    def has_failed(self, rank: int) -> bool:
        """Tell whether that rank has given up."""
        return self.counters[self.counter_offsets[rank] + ARRIVED] == NEVER

    def close(self) -> None:
        """Show the others that this rank has ended. Tensors in the memory stay valid."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            self.failure = RuntimeError("shm: the group was destroyed")
