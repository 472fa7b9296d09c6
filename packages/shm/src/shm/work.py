"""Calls that are not complete yet, and who carries them on.

A call is a generator. It does what it can, yields the ranks that it waits for, and goes on when it
is polled again. Whoever waits for one call polls all calls of this process, of every group: so two
groups may be used in another order on each rank. When nobody waits, a thread polls, because a
program may start a call and then do something else for as long as it likes.
"""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.futures import Future

from shm.segment import BELL, Segment, Steps

CHECK = 200  # polls between checks that a rank lives
NAP, LONGEST_NAP = 50e-6, 1e-3  # seconds
PATIENCE = 0.01  # seconds: DDP asks for a future at once, and waiting here is faster than a thread

CallQueue = deque["Work"]  # calls that must be carried out in their order


class Work(dist.Work):
    """What a call returns: `wait()` raises what went wrong, on every use.

    outputs: what the call's future holds. limit: how long it may wait for the others.
    """

    awaited: Sequence[int] = ()  # ranks
    bell = BELL  # of an awaited rank: what it rings when this call can go on
    deadline = 0.0  # known from the first poll on
    polls = 0
    done = False
    error: Exception | None = None
    source = -1  # the rank whose message was received
    future: Future | None = None  # fulfilled at the end, once for all who asked

    def __init__(self, segment: Segment, steps: Steps, outputs: object) -> None:
        super().__init__()
        self.segment = segment
        self.steps = steps
        self.outputs = outputs
        self.limit = segment.limit
        self.spins = segment.spins  # polls before it sleeps

    def advance(self) -> bool:
        """Go on as far as possible; True if that was the end. Only `Pending` calls this."""
        try:
            if self.segment.failure:
                raise self.segment.failure.with_traceback(None)  # without those of earlier calls
            self.poll()
        except StopIteration as end:
            self.done = True
            self.source = -1 if end.value is None else end.value
        except Exception as error:
            self.done, self.error = True, error
        except BaseException as interrupt:
            self.segment.give_up_if_interrupted(interrupt)
            raise
        if self.done:
            self.steps.close()  # it holds the tensors
        return self.done

    def poll(self) -> None:
        """Let the steps go on; fail if a rank that they wait for has ended or is too late."""
        self.awaited = awaited = next(self.steps)
        self.polls += 1
        if self.polls == 1:
            self.deadline = time.monotonic() + self.limit.total_seconds()
        if self.polls % CHECK:
            return
        failed = [rank for rank in awaited if self.segment.has_failed(rank)]
        ended = [rank for rank in awaited if rank in failed or not self.segment.is_alive(rank)]
        if ended == awaited and next(self.steps) == awaited:  # it did not arrive just before
            how = "failed" if failed else "ended"
            what = f"has {how} while rank {self.segment.rank} waits for it"
            self.segment.fail(f"rank {' and '.join(map(str, ended))} {what}")
        if time.monotonic() > self.deadline:
            what = f"is more than {self.limit} late, which is the timeout of this call"
            self.segment.fail(f"rank {' or '.join(map(str, awaited))} {what}", TimeoutError)

    def is_completed(self) -> bool:
        pending.poll()
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
        if not pending.wait(self, timeout.total_seconds() if timeout else None):  # 0: no limit
            raise TimeoutError(f"shm: this call is not complete after the timeout of {timeout}")
        if self.error:
            raise self.error
        return True

    def get_future(self) -> Future:
        """A future that holds the outputs, or the error, at the end of the call."""
        pending.wait(self, PATIENCE)
        with pending.lock:
            if not self.done and self.future is None:
                self.future = Future()
        if self.error:
            raise self.error
        if self.future is None:
            future: Future = Future()
            future.set_result(self.outputs)
            return future
        return self.future.then(lambda _: self.outputs_or_error())  # C++ sees this error as well

    def outputs_or_error(self) -> object:
        if self.error:
            raise self.error
        return self.outputs


class Completed(Work):
    """A call that has ended at once. Give it its outputs."""

    done = True
    __init__ = dist.Work.__init__  # of C++: one more in Python would cost as much as the sum


class Pending:
    """All calls of this process that are not complete."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.needs_thread = threading.Condition(self.lock)  # calls run, and nobody waits
        self.running: list[CallQueue] = []
        self.waiting = 0  # threads
        self.stopped = False  # because the interpreter ends
        self.thread: threading.Thread | None = None

    def start(self, queue: CallQueue, work: Work, wait: bool) -> Work:
        """Begin a call after the others of its queue. Without `wait`, a thread carries it on."""
        with self.lock:
            if not queue:
                self.running.append(queue)
            queue.append(work)
        self.poll()
        if wait:
            work.wait()
        elif not work.done:
            self.wake_thread()
        elif work.error:
            raise work.error
        return work

    def lock_if_free(self, segment: Segment) -> bool:
        """No call runs, so another may begin at once: then this holds the lock."""
        if self.running or segment.failure:
            return False
        return self.lock.acquire(False)

    def complete_at_once(self, work: Work, wait: bool) -> bool:
        """Carry out a call on the spot, if no other runs and all ranks come at once, as most do.

        Then it needs no queue, no clock, and nobody who asks whether a rank lives.
        """
        if not self.lock_if_free(work.segment):
            return False
        try:
            next(work.steps)
            for _ in range(work.segment.spins if wait else 0):
                os.sched_yield()
                next(work.steps)
        except StopIteration as end:
            work.done = True
            work.source = -1 if end.value is None else end.value
        except BaseException as interrupt:
            work.segment.give_up_if_interrupted(interrupt)
            raise
        finally:
            self.lock.release()
        return work.done

    def poll(self) -> bool:
        """Let each call go on as far as it can; True if one has come to its end."""
        finished: list[Work] = []
        with self.lock:
            for queue in tuple(self.running):
                while queue and queue[0].advance():
                    finished.append(queue.popleft())
                if not queue:
                    self.running.remove(queue)
        for work in finished:
            if work.future:  # in a thread: its callbacks may wait for other calls
                fulfill = partial(work.future.set_result, None)
                threading.Thread(target=fulfill, daemon=True).start()
        return bool(finished)

    def wait(self, work: Work, seconds: float | None = None) -> bool:
        """Poll until this call is complete; False if it is not after that time."""
        if work.done:
            return True
        with self.lock:
            self.waiting += 1
        polls, deadline = 0, time.monotonic() + (seconds or 0)
        try:
            while not work.done:
                if seconds is not None and time.monotonic() > deadline:
                    return False
                self.poll()
                polls += 1
                if polls < work.spins:
                    os.sched_yield()
                elif len(self.running) == 1 and len(work.awaited) == 1:
                    work.segment.sleep_until_bell(work.awaited[0], work.bell, LONGEST_NAP)
                else:
                    time.sleep(NAP)
            return True
        finally:
            with self.lock:
                self.waiting -= 1
            if self.running:
                self.wake_thread()

    def wake_thread(self) -> None:
        """Let the thread carry on what runs. There is none before the first time."""
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self.poll_in_thread, name="shm", daemon=True)
                self.thread.start()
            self.needs_thread.notify()

    def poll_in_thread(self) -> None:
        nap = NAP
        while not self.stopped:
            with self.lock:
                while (self.waiting or not self.running) and not self.stopped:
                    self.needs_thread.wait()
            nap = NAP if self.poll() else min(2 * nap, LONGEST_NAP)
            time.sleep(nap)

    def stop(self) -> None:
        """End the thread before the interpreter ends: a thread killed in C++ would abort it."""
        with self.lock:
            self.stopped = True
            self.needs_thread.notify()
        if self.thread:
            self.thread.join(timeout=5)


pending = Pending()
atexit.register(pending.stop)
os.register_at_fork(after_in_child=pending.__init__)  # a new process has no thread
