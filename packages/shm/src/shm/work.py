"""Calls that are not complete yet, and the scheduler that carries them on.

A call is a generator. It does what it can, yields the ranks that it waits for, and goes on when it
is polled again. Whoever waits for one call polls all calls of this process, of every group: so two
groups may be used in another order on each rank. When nobody waits, a thread polls, because a
program may start a call and then do something else for as long as it likes.

An exception may cut a call off anywhere: Ctrl-C, or what the handler of a signal raises. Then the
lock of this process is freed, and the group of a call that had begun ends. A handler may also make
a call itself. That works where the interrupted call only waits, because the new one comes after it
in the queue; where it holds the lock, nobody could complete it first, so the new one is refused.
"""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from shm.segment import BELL, ENDED, LATE, SPINS, CallSteps, Cause, Segment

POLLS_PER_CHECK = 200  # polls of a call between two checks that the awaited ranks live
NAP, MAX_NAP = 50e-6, 1e-3  # seconds
IDLE_NAPS = 2  # of the thread before it sleeps, since waking it takes longer than most waits
FUTURE_WAIT = 0.01  # seconds: DDP asks for a future at once, and a thread would take longer

CallQueue = deque["Work"]  # calls that must be carried out in their order


def timeout_of(options: Any) -> timedelta | None:
    """Return the timeout in the options of a call, or None if the one of its group holds."""
    timeout = options.timeout if options else timedelta(-1)
    return timeout if timeout > timedelta(0) else None


class Work(dist.Work):
    """The handle that a call returns: each `wait()` raises what went wrong.

    outputs: what the call's future holds. options: torch's; they may limit how long it may wait.
    """

    awaited: Sequence[int] = ()  # the ranks that this call waits for
    bell = BELL  # which bell an awaited rank rings when this call can go on
    deadline = 0.0  # set by the first poll
    polls = 0
    transfers_before: int | None = None  # the group's transfers when this call began
    done = False
    error: Exception | None = None
    source = -1  # the rank whose message was received
    future: Future | None = None  # fulfilled at the end, once for all who asked

    def __init__(
        self, segment: Segment, steps: CallSteps, outputs: object, options: Any = None
    ) -> None:
        super().__init__()
        self.segment = segment
        self.steps = steps
        self.outputs = outputs
        self.options = options

    def advance(self) -> bool:
        """Go on as far as possible; True if that was the end. Only `CallScheduler` calls this."""
        try:
            return self.done or self.advance_to_end()
        except BaseException as interrupt:
            scheduler.give_up(self.segment, interrupt)
            raise

    def advance_to_end(self) -> bool:
        if self.transfers_before is None:
            self.transfers_before = self.segment.transfers
        try:
            if self.segment.failure:
                raise self.segment.failure.with_traceback(None)  # without those of earlier calls
            self.poll()
        except StopIteration as end:
            self.complete(end)
        except Exception as error:
            self.end_with(error)
        if self.done:
            self.steps.close()  # the generator holds the tensors
        return self.done

    def complete(self, end: StopIteration) -> None:
        """Take over what the generator has returned: a source rank, or None."""
        if end.value is not None:
            self.source = end.value
        self.done = True

    def end_with(self, error: Exception) -> None:
        """Fail. If this call has already exchanged data, its group ends.

        An error before that, such as a wrong argument, fails only this call.
        """
        if self.segment.transfers != self.transfers_before:
            scheduler.give_up(self.segment, error)
        self.error = error
        self.done = True

    def poll(self) -> None:
        """Let the steps go on; fail if a rank that they wait for has ended or is too late."""
        self.awaited = awaited = next(self.steps)
        self.polls += 1
        if self.polls == 1:
            self.own_timeout = timeout_of(self.options) or self.segment.timeout
            self.deadline = time.monotonic() + self.own_timeout.total_seconds()
        if self.polls % POLLS_PER_CHECK:
            return
        failed = [rank for rank in awaited if self.segment.has_failed(rank)]
        ended = [rank for rank in awaited if rank in failed or not self.segment.is_alive(rank)]
        if ended == awaited and next(self.steps) == awaited:  # none arrived just before it ended
            if failed:
                self.segment.fail_after(failed[0], "go on")
            who = " and ".join(map(str, ended))
            what = f"rank {who} has ended while rank {self.segment.rank} waits for it"
            self.segment.fail(what, cause=Cause(ENDED, ended[0]))
        if time.monotonic() > self.deadline:
            what = f"is more than {self.own_timeout} late, which is the timeout of this call"
            cause = Cause(LATE, awaited[0]) if len(awaited) == 1 else None
            self.segment.fail(f"rank {' or '.join(map(str, awaited))} {what}", TimeoutError, cause)

    def is_completed(self) -> bool:
        scheduler.poll()
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
        # torch passes a timeout of 0 for none
        if not scheduler.wait(self, timeout.total_seconds() if timeout else None):
            raise TimeoutError(f"shm: this call is not complete after the timeout of {timeout}")
        if self.error:
            raise self.error
        return True

    def get_future(self) -> Future:
        """A future that holds the outputs, or the error, at the end of the call."""
        scheduler.wait(self, FUTURE_WAIT)
        scheduler.run_locked(self.ensure_future)
        if self.error:
            raise self.error
        if self.future is None:
            future: Future = Future()
            future.set_result(self.outputs)
            return future
        return self.future.then(lambda _: self.outputs_or_error())  # C++ sees this error as well

    def ensure_future(self) -> None:
        if not self.done and self.future is None:
            self.future = Future()

    def fulfill_future(self) -> None:
        if self.future and not self.future.done():
            self.future.set_result(None)

    def outputs_or_error(self) -> object:
        if self.error:
            raise self.error
        return self.outputs


class Completed(Work):
    """A call that has ended at once. Whoever makes it sets its outputs."""

    done = True
    __init__ = dist.Work.__init__  # in C++: an __init__ in Python costs as much as a small sum


class CallScheduler:
    """Begins the calls of this process, and carries on those that are not complete."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # knows its thread from the moment in which it is taken
        self.needs_thread = threading.Condition(self.lock)  # notified if calls run and nobody waits
        self.running: list[CallQueue] = []  # the queues that are not empty
        self.finished: set[Work] = set()  # calls that have ended, and whose futures have not
        self.waiting: set[int] = set()  # the threads that wait for a call
        self.stopped = False  # True once the interpreter ends
        self.thread: threading.Thread | None = None
        self.thread_sleeps = False

    # The process lock. An exception may come between any two instructions. So whoever takes the
    # lock frees it in a `try` that begins before, and asks the lock itself whether it was taken

    def run_locked(self, action: Callable[[], Any]) -> Any:
        """Hold the lock while action() runs, and return what it returns.

        Raises RuntimeError in the handler of a signal that came while its thread holds the lock.
        """
        if self.lock._is_owned():
            what = "got a call from the handler of a signal that has interrupted another one"
            raise RuntimeError(f"shm: {what}: let it set a flag, and call where you read that")
        try:
            with self.lock:
                return action()
        except BaseException:
            self.free_lock()
            raise

    def free_lock(self) -> None:
        while self.lock._is_owned():
            self.lock.release()

    def give_up(self, segment: Segment, error: BaseException) -> None:
        """End the group, because the other ranks go on with a call that is cut off here."""
        with self.lock:  # keeps the thread from announcing one more arrival afterwards
            segment.give_up(f"{type(error).__name__} has interrupted a call")

    # Calls

    def start(self, queue: CallQueue, work: Work, wait: bool) -> Work:
        """Begin a call after the others of its queue. Without `wait`, a thread carries it on."""
        if not self.begin_if_idle(work.segment, self.take_first_steps, queue, work, wait):
            self.run_locked(partial(self.enqueue, queue, work))
        return work if work.done else self.carry_on(work, wait)

    def begin_if_idle(
        self, segment: Segment, begin: Callable[..., Work], *arguments: Any
    ) -> Work | None:
        """Hold the lock while begin(*arguments) runs, and return what it returns.

        Returns None, and begins nothing, if a call runs, the group has ended, or the lock is taken.
        If begin() is cut off after it has exchanged data, the group ends.
        """
        if self.running or segment.failure or self.lock._is_owned():
            return None
        transfers = segment.transfers
        try:
            if not self.lock.acquire(False):
                return None
            work = begin(*arguments)
            self.lock.release()
        except BaseException as error:
            if segment.transfers != transfers:
                self.give_up(segment, error)
            self.free_lock()
            raise
        return work

    def take_first_steps(self, queue: CallQueue, work: Work, wait: bool) -> Work:
        """Carry out a call on the spot if all ranks come at once, as most do. Needs the lock.

        Then it needs no queue, no clock, and no check that a rank lives. If a rank does not come,
        the call is queued here, before the lock is freed, so that no other call comes between.
        """
        work.transfers_before = work.segment.transfers
        try:
            next(work.steps)
            for _ in range(SPINS if wait else 0):
                os.sched_yield()
                next(work.steps)
            self.enqueue(queue, work)
        except StopIteration as end:
            work.complete(end)
        return work

    def enqueue(self, queue: CallQueue, work: Work) -> None:
        """Append a call to its queue. Needs the lock."""
        if not queue:
            self.running.append(queue)
        queue.append(work)

    def carry_on(self, work: Work, wait: bool) -> Work:
        """Go on with a call that is in its queue; with `wait`, to its end."""
        self.poll()
        if wait:
            work.wait()
        elif not work.done:
            self.wake_thread()
        elif work.error:
            raise work.error
        return work

    def poll(self) -> bool:
        """Let each call go on as far as it can; True if one has come to its end."""
        has_finished = self.run_locked(self.advance_all)
        for work in tuple(self.finished):  # in threads, since a callback may wait for other calls
            threading.Thread(target=work.fulfill_future, daemon=True).start()
            self.finished.discard(work)
        return has_finished

    def advance_all(self) -> bool:
        has_finished = False
        for queue in tuple(self.running):
            while queue and queue[0].advance():
                if queue[0].future:
                    self.finished.add(queue[0])
                queue.popleft()
                has_finished = True
            if not queue:
                self.running.remove(queue)
        return has_finished

    def wait(self, work: Work, seconds: float | None = None) -> bool:
        """Poll until this call is complete; False if it is not after that time."""
        if work.done:
            return True
        polls, deadline = 0, time.monotonic() + (seconds or 0)
        try:
            self.waiting.add(threading.get_ident())
            while not work.done:
                if seconds is not None and time.monotonic() > deadline:
                    return False
                self.poll()
                polls += 1
                if polls < SPINS:
                    os.sched_yield()
                elif len(self.running) == 1 and len(work.awaited) == 1:
                    work.segment.sleep_until_bell(work.awaited[0], work.bell, MAX_NAP)
                else:
                    time.sleep(NAP)
            return True
        finally:
            self.waiting.discard(threading.get_ident())
            if self.running:
                self.wake_thread()

    def wake_thread(self) -> None:
        """Let the thread carry on what runs. The first call starts it."""
        self.run_locked(self.notify_thread)

    def notify_thread(self) -> None:
        self.waiting.discard(threading.get_ident())  # still there if the end of wait() was cut off
        if self.thread is None:
            thread = threading.Thread(target=self.poll_in_thread, name="shm", daemon=True)
            thread.start()
            self.thread = thread
        if self.thread_sleeps:
            self.needs_thread.notify_all()

    def poll_in_thread(self) -> None:
        nap, idle_naps = NAP, 0
        while not self.stopped:
            if self.running and not self.waiting:
                nap, idle_naps = NAP if self.poll() else min(2 * nap, MAX_NAP), 0
            elif idle_naps < IDLE_NAPS:
                nap, idle_naps = MAX_NAP, idle_naps + 1
            else:
                self.sleep_until_needed()
                nap, idle_naps = NAP, 0
            time.sleep(nap)

    def sleep_until_needed(self) -> None:
        with self.lock:
            if (self.waiting or not self.running) and not self.stopped:
                self.thread_sleeps = True
                self.needs_thread.wait()
                self.thread_sleeps = False

    def stop(self) -> None:
        """End the thread before the interpreter ends: a thread killed in C++ would abort it."""
        self.stopped = True
        if self.lock.acquire(timeout=5):
            self.needs_thread.notify_all()
        self.free_lock()
        if self.thread:
            self.thread.join(timeout=5)


scheduler = CallScheduler()
atexit.register(scheduler.stop)
os.register_at_fork(after_in_child=scheduler.__init__)  # a new process has no thread
