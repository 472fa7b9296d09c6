"""Calls that are not complete yet, and who carries them on.

A call is a generator. It does what it can, yields the ranks that it waits for, and goes on at the
next look. Whoever waits for one call looks at all calls of this process, of every group: so two
groups may be used in another order on each rank. When nobody waits, a thread looks, because a
program may start a call and then do something else for as long as it likes.
"""

import atexit
import os
import threading
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shm.segment import Segment, Steps

SPINS, CHECK = 1000, 200  # looks before the first nap, and between checks that a rank lives
NAP, LONGEST_NAP = 50e-6, 1e-3  # seconds
PATIENCE = 0.01  # seconds: DDP asks for a future at once, and waiting here is faster than a thread

Line = deque["Work"]  # calls that must be carried out in their order


class Work(dist.Work):
    """What a call returns: `wait()` raises what went wrong, on every use.

    outputs: what the call's future holds. limit: how long it may wait for the others.
    """

    def __init__(
        self, segment: Segment, steps: Steps, outputs: object, limit: timedelta | None = None
    ) -> None:
        super().__init__()
        self.segment, self.steps, self.outputs = segment, steps, outputs
        self.limit, self.deadline, self.looks = limit or segment.limit, 0.0, 0
        self.done, self.error, self.source = False, None, -1
        self.promised: Future | None = None

    def step(self) -> bool:
        """Go on as far as possible; True if that was the end. Only `Progress` calls this."""
        try:
            if self.segment.failed:
                raise RuntimeError(self.segment.failed)
            self.look()
        except StopIteration as end:
            self.done = True
            self.source = -1 if end.value is None else end.value
        except Exception as error:
            self.done, self.error = True, error
        if self.done:
            self.steps.close()  # it holds the tensors
        return self.done

    def look(self) -> None:
        awaited, self.looks = next(self.steps), self.looks + 1
        if self.looks == 1:
            self.deadline = time.monotonic() + self.limit.total_seconds()
        if self.looks % CHECK:
            return
        ended = [rank for rank in awaited if not self.segment.lives(rank)]
        if ended == awaited and next(self.steps) == awaited:  # it did not arrive just before
            what = f"has ended while rank {self.segment.rank} waits for it"
            self.segment.fail(f"rank {' and '.join(map(str, ended))} {what}")
        if time.monotonic() > self.deadline:
            what = f"is more than {self.limit} late, which is the timeout of this call"
            self.segment.fail(f"rank {' or '.join(map(str, awaited))} {what}", TimeoutError)

    def is_completed(self) -> bool:
        progress.look()
        return self.done

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def result(self) -> object:
        return self.outputs

    def source_rank(self) -> int:
        """The rank whose message was received."""
        return self.source

    _source_rank = source_rank

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; after `timeout`, raise TimeoutError and let the call go on."""
        if not progress.wait(self, timeout.total_seconds() if timeout else None):  # 0: no limit
            raise TimeoutError(f"shm: this call is not complete after the timeout of {timeout}")
        if self.error:
            raise self.error
        return True

    def get_future(self) -> Future:
        """A future that holds the outputs, or the error, at the end of the call."""
        progress.wait(self, PATIENCE)
        if self.error:
            raise self.error
        future: Future = Future()
        with progress.lock:
            if not self.done:
                self.promised = future
        if self.promised is None:
            future.set_result(self.outputs)
            return future
        return future.then(lambda _: self.outputs_or_error())  # an error that C++ sees as well

    def outputs_or_error(self) -> object:
        if self.error:
            raise self.error
        return self.outputs


class Progress:
    """All calls of this process that are not complete."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.unattended = threading.Condition(self.lock)  # calls run, and nobody waits
        self.running: list[Line] = []
        self.waiting, self.stopped = 0, False  # how many threads wait; the interpreter ends
        self.thread: threading.Thread | None = None

    def start(self, line: Line, work: Work, wait: bool) -> Work:
        """Begin a call after the others of its line. Without `wait`, a thread carries it on."""
        with self.lock:
            line.append(work)
            if len(line) == 1:
                self.running.append(line)
        self.look()
        if wait:
            work.wait()
        elif not work.done:
            self.attend()
        elif work.error:
            raise work.error
        return work

    def look(self) -> bool:
        """Let each call go on as far as it can; True if one has come to its end."""
        finished: list[Work] = []
        with self.lock:
            for line in tuple(self.running):
                while line and line[0].step():
                    finished.append(line.popleft())
                if not line:
                    self.running.remove(line)
        for work in finished:
            if work.promised:  # in a thread: its callbacks may wait for other calls
                tell = threading.Thread(target=work.promised.set_result, args=(None,), daemon=True)
                tell.start()
        return bool(finished)

    def wait(self, work: Work, seconds: float | None = None) -> bool:
        """Look until this call is complete; False if it is not after that time."""
        if work.done:
            return True
        with self.lock:
            self.waiting += 1
        looks, deadline = 0, time.monotonic() + (seconds or 0)
        try:
            while not work.done:
                if seconds is not None and time.monotonic() > deadline:
                    return False
                self.look()
                looks += 1
                if looks < SPINS:
                    os.sched_yield()  # nothing, unless there are more ranks than cores
                else:
                    time.sleep(NAP)
            return True
        finally:
            with self.lock:
                self.waiting -= 1
            if self.running:
                self.attend()

    def attend(self) -> None:
        """Let the thread carry on what runs. There is none before the first time."""
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self.carry_on, name="shm", daemon=True)
                self.thread.start()
            self.unattended.notify()

    def carry_on(self) -> None:
        nap = NAP
        while not self.stopped:
            with self.lock:
                while (self.waiting or not self.running) and not self.stopped:
                    self.unattended.wait()
            nap = NAP if self.look() else min(2 * nap, LONGEST_NAP)
            time.sleep(nap)

    def stop(self) -> None:
        """End the thread before the interpreter ends: a thread killed in C++ would abort it."""
        with self.lock:
            self.stopped = True
            self.unattended.notify()
        if self.thread:
            self.thread.join(timeout=5)


progress = Progress()
atexit.register(progress.stop)
os.register_at_fork(after_in_child=progress.__init__)  # a new process has no thread


def without_autograd(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that autograd neither records nor counts changes of, as in gloo.

    A result of inference_mode may be changed too, by any thread and after that mode has ended.
    """
    if not tensor.is_inference():
        return tensor.data
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype)
        where = tensor.storage_offset(), tensor.shape, tensor.stride()
        return alias.set_(tensor.untyped_storage(), *where)
