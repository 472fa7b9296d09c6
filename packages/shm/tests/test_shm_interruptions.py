"""A call is cut off: what is left of it makes no wrong result, and the other ranks learn of it.

An exception may come between any two instructions of a call, and so may a handler that calls.
Python runs the handlers of signals between instructions. Here a trace function raises what Ctrl-C
raises, or makes a call as a handler would, before each instruction that the backend executes in a
call.
"""

import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from inspect import currentframe
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shm
from shm.segment import Segment
from shm.work import CallScheduler, scheduler
from shm_cases import outcome_of, without_a_compiler
from shm_ranks import patience, run_on_ranks

FOLDER = str(Path(shm.__file__).parent)
LIMIT = timedelta(seconds=patience(30))
EACH, SOME = 1, 7  # test each instruction, or every seventh
KINDS = [KeyboardInterrupt, TimeoutError]  # the handler of a signal may raise the second one


@contextmanager
def before_instruction(number, action):
    """Run the action once, before the instruction of that number that the backend executes."""
    executed = []

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            executed.append(event)
            if len(executed) == number + 1:
                action()
        return trace

    currentframe().f_trace_opcodes = True  # Python 3.12 asks for it before settrace
    sys.settrace(trace)
    try:
        yield executed
    finally:
        sys.settrace(None)


def raise_at_once(kind):
    raise kind


def is_lock_free():
    """Tell whether another thread may take the lock, such as the one that carries calls on."""
    answers = []

    def take_and_free():
        answers.append(scheduler.lock.acquire(blocking=False))
        if answers[0]:
            scheduler.lock.release()

    thread = threading.Thread(target=take_and_free)
    thread.start()
    thread.join()
    return answers[0]


# One rank, which ends afterwards: else `run_on_ranks` would fail

CALLS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "all_reduce of float16": lambda group: dist.all_reduce(torch.ones(3).half(), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(3), 0, group=group),
    "barrier": lambda group: dist.barrier(group),
    "async all_reduce": lambda group: dist.all_reduce(
        torch.ones(3), group=group, async_op=True
    ).get_future(),
}
WAYS = [(KeyboardInterrupt, "all_reduce", EACH), (TimeoutError, "all_reduce", EACH)]
WAYS += [(KeyboardInterrupt, name, SOME) for name in CALLS if name != "all_reduce"]
WAYS += [(TimeoutError, "broadcast", SOME)]


def interrupted_calls(rank, kind, name, stride):
    """Count the outcomes of interrupted calls, of the next ones, and of the lock."""
    dist.init_process_group("gloo", timeout=LIMIT)
    outcomes, number = Counter(), 0
    while not outcomes["cut off: right"]:  # until the call has no instruction of that number
        group = dist.new_group(backend="shm")
        with before_instruction(number, partial(raise_at_once, kind)):
            outcomes["cut off: " + outcome_of(CALLS[name], group)] += 1
        if not is_lock_free():
            outcomes["locked"] += 1
            CallScheduler.free_lock(scheduler)  # or the same lock would count again
        outcomes[outcome_of(CALLS[name], group)] += 1
        dist.destroy_process_group(group)
        number += stride
    return outcomes


@pytest.mark.parametrize(("kind", "name", "stride"), WAYS)
def test_after_an_exception_at_any_instruction_the_next_call_works_or_says_why_not(
    kind, name, stride
):
    [outcomes] = run_on_ranks(1, interrupted_calls, kind, name, stride)
    assert outcomes.pop(f"cut off: {kind.__name__}: ") > 50 / stride
    assert outcomes.pop("cut off: right") == 1, "the last one"
    assert set(outcomes) == {
        "right",
        f"RuntimeError: shm: {kind.__name__} has interrupted a call",
    }, outcomes


def test_without_the_repair_the_lock_stays_locked():
    """The control: these are the instructions just before and after the lock was taken."""
    [outcomes] = run_on_ranks(1, interrupted_calls_without_repair)
    assert outcomes["locked"] > 0


def interrupted_calls_without_repair(rank):
    with patch.object(scheduler, "free_lock", lambda: None):
        return interrupted_calls(rank, KeyboardInterrupt, "all_reduce", EACH)


INTERRUPTED_BY_SIGNALS = """
import random, signal
import torch, torch.distributed as dist
import shm

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C
dist.all_reduce(torch.ones(3), group=dist.new_group(backend="shm"), async_op=True)
shm.group.scheduler.wake_thread()  # the one that the process waits for at its end
for _ in range(100):
    try:
        group = dist.new_group(backend="shm")
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 1e-3))
        while True:
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            dist.broadcast(x, 0, group=group)
            assert (x == 1).all()
    except KeyboardInterrupt:
        y = torch.ones(3)
    try:
        dist.all_reduce(y, group=group)
    except RuntimeError as error:
        assert str(error) == "shm: KeyboardInterrupt has interrupted a call", error
group = dist.new_group(backend="shm")
signal.setitimer(signal.ITIMER_REAL, 0.01)
while True:
    dist.all_reduce(torch.ones(3), group=group)
"""


def test_a_process_ends_that_ctrl_c_has_interrupted_in_a_hundred_calls_and_once_more():
    command = [sys.executable, "-c", INTERRUPTED_BY_SIGNALS]
    process = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert process.stderr.rstrip().endswith("KeyboardInterrupt"), process.stderr
    assert process.returncode == -signal.SIGINT  # how Python ends after an uncaught one


# Two ranks: what is left of a call that was cut off must not become part of the next one


def go_on():
    pass


def sums_around_an_interruption(rank, interrupt):
    """Return the result or the outcome of two sums of four pieces; rank 1 is cut off in the first.

    interrupt: called then, without arguments. Rank 0 adds up in C if it has a compiler.
    """
    with without_a_compiler() if rank == 1 else nullcontext():
        dist.init_process_group("shm", timeout=timedelta(seconds=20))
    pieces, arrive, results = dist.group.WORLD.segment.arrivals, Segment.arrive, []

    def arrive_or_be_cut_off(segment, call):
        if rank == 1 and segment.arrivals == pieces + 2:
            interrupt()
        return arrive(segment, call)

    for value, method in ((1.0, arrive_or_be_cut_off), (10.0, arrive)):
        x = torch.full((2_000_000,), value * (rank + 1))
        with patch.object(Segment, "arrive", method):
            outcome = outcome_of(dist.all_reduce, x)
        results.append(x.unique().tolist() if outcome == "right" else outcome)
    return results


SUM = "all_reduce(2000000 of torch.float32, SUM)"


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_call_ends_the_group_instead_of_making_a_wrong_sum(kind):
    first, second = run_on_ranks(2, sums_around_an_interruption, partial(raise_at_once, kind))
    line = f"RuntimeError: shm: rank 1 has failed, so rank 0 cannot complete {SUM}"
    assert first == [line] * 2
    assert second == [
        f"{kind.__name__}: ",
        f"RuntimeError: shm: {kind.__name__} has interrupted a call",
    ]
    control = run_on_ranks(2, sums_around_an_interruption, go_on)
    assert control == [[[3.0], [30.0]]] * 2


def sums_around_an_interruption_that_nobody_notices(rank):
    with patch.object(type(scheduler), "give_up", lambda *_: None):
        return sums_around_an_interruption(rank, partial(raise_at_once, TimeoutError))


def test_the_number_of_the_transfer_tells_a_call_from_the_rest_of_the_one_before():
    """The second defense, for a call that was cut off and has not ended the group."""
    first, second = run_on_ranks(2, sums_around_an_interruption_that_nobody_notices)
    apart = f"and rank {{}} in {{}}: an earlier call than this {SUM} was interrupted"
    assert first == [f"RuntimeError: shm: rank 1 is in transfer 2, {apart.format(0, 1)}"] * 2
    line = f"RuntimeError: shm: rank 0 is in transfer 1, {apart.format(1, 2)}"
    assert second == ["TimeoutError: ", line]


def messages_around_an_interruption(rank):
    """Cut off rank 1 in the first of two messages of two pieces; return the outcome of rank 0."""
    dist.init_process_group("shm", timeout=timedelta(seconds=20))
    x = torch.full((100_000,), 7.0)
    if rank == 0:
        return outcome_of(dist.recv, x, 1)
    post = Segment.post

    def post_first_piece(segment, counters, index, value, *bell):
        if value > 1:
            raise TimeoutError
        return post(segment, counters, index, value, *bell)

    with patch.object(Segment, "post", post_first_piece), pytest.raises(TimeoutError):
        dist.send(x, 0)
    dist.group.WORLD.messages.piece_counts.update({2: 1})  # as if the piece had not been counted
    with suppress(RuntimeError):  # rank 0 has ended
        dist.send(2 * x, 0)


def test_a_message_that_was_cut_off_is_not_completed_with_the_next_one():
    error, _ = run_on_ranks(2, messages_around_an_interruption)
    what = "sends a message from byte 0 on, not from 262144: one of the two was interrupted"
    assert error == f"RuntimeError: shm: rank 1 {what}"


# Two ranks: one of them is interrupted at any instruction, and may have waited for a while


def calls_around_an_interruption(rank, kind, numbers):
    """Return the outcomes of two sums. Rank 1 is interrupted in the first; rank 0 is late there."""
    dist.init_process_group("gloo", timeout=LIMIT)
    store, outcomes = dist.distributed_c10d._get_default_store(), []
    for number in numbers:
        group, key = dist.new_group(backend="shm"), f"interrupted before {number}"
        sums = [torch.full((600_000,), rank + 1.0) for _ in range(2)]  # in two pieces
        if rank == 0:
            store.wait([key], LIMIT)
            outcomes_here = [outcome_of(dist.all_reduce, x, group=group) for x in sums]
        else:

            def cut_off(key=key):
                store.set(key, "")
                raise kind

            with before_instruction(number, cut_off):
                outcomes_here = [outcome_of(dist.all_reduce, sums[0], group=group)]
            outcomes_here.append(outcome_of(dist.all_reduce, sums[1], group=group))
        outcomes.append((outcomes_here, [x.unique().tolist() for x in sums]))
        dist.destroy_process_group(group)  # so that nobody waits for a call that was never made
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_rank_learns_of_it_at_once_wherever_the_exception_comes(kind):
    """An Exception that comes before a call has begun is like a wrong argument: no call was made.
    Once a call is in its queue, it goes on in the background, as after the timeout of a wait."""
    numbers = [*range(0, 400, 23), 900, 3500]  # in the end it sleeps and looks, in turns
    pairs = run_on_ranks(2, calls_around_an_interruption, kind, numbers)
    ended = 0
    for number, (others, sums), ((first, second), _) in zip(numbers, *pairs, strict=True):
        assert first == f"{kind.__name__}: ", number
        if second == "right":
            sums_right = [x for x, outcome in zip(sums, others, strict=True) if outcome == "right"]
            assert sums_right == [[3.0]] * len(sums_right)
            assert others[0] == "right", number
            assert others[1] in (
                "right",
                "RuntimeError: shm: rank 1 has ended while rank 0 waits for it",
            )
        else:
            ended += 1
            assert second == f"RuntimeError: shm: {kind.__name__} has interrupted a call"
            if others[0] == "right":  # the thread had carried it on before the exception came
                assert sums[0] == [3.0]
                del others[0]
            for other in others:
                assert other.startswith("RuntimeError: shm: rank 1 has failed, so rank 0"), number
    first_line = 1  # before the call's `try`: as if the exception had come before the call
    assert ended >= (len(numbers) - first_line if kind is KeyboardInterrupt else 5)
    assert ended < len(numbers)


# A handler that makes a call itself


REFUSED = "shm: got a call from the handler of a signal that has interrupted another one: "


class Handler:
    """Makes a call in a group of this rank alone, and counts the outcomes."""

    def __init__(self, group):
        self.group = group
        self.outcomes = Counter()

    def __call__(self, *_):
        x = torch.full((3,), 5.0)
        outcome = outcome_of(dist.all_reduce, x, group=self.group)
        assert (x == 5).all()
        self.outcomes[outcome.partition(REFUSED)[1] or outcome] += 1


def handlers_in_calls(rank, name, stride):
    """Let a handler call before each instruction, in the same group and in another one."""
    dist.init_process_group("gloo", timeout=LIMIT)
    group, number, outcomes = dist.new_group(backend="shm"), 0, Counter()
    for handlers_group in (group, dist.new_group(backend="shm")):
        handler, calls, number = Handler(handlers_group), 0, 0
        while handler.outcomes.total() == calls:
            x = torch.ones(3)
            with before_instruction(number, handler):
                CALLS[name](group)
            dist.all_reduce(x, group=group)
            assert (x == 1).all()
            assert is_lock_free()
            calls, number = calls + 1, number + stride
        outcomes += handler.outcomes
    return outcomes


@pytest.mark.parametrize(("name", "stride"), [(name, SOME) for name in CALLS])
def test_a_handler_at_any_instruction_of_a_call_works_or_is_refused_at_once(name, stride):
    [outcomes] = run_on_ranks(1, handlers_in_calls, name, stride)
    assert set(outcomes) == {"right", REFUSED}, outcomes


def handler_while_a_rank_waits(rank):
    """Call twice on both ranks: on rank 1 the second time in a handler, while it waits."""
    dist.init_process_group("gloo", timeout=LIMIT)
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group(backend="shm")
    first, second = torch.full((600_000,), 1.0), torch.full((3,), 10.0)
    handled = []

    def handle(segment, *_):
        if not handled:
            handled.append("")
            work = dist.all_reduce(second, group=group, async_op=True)
            store.set("rank 1 has made both calls", "")
            work.wait()

    if rank == 0:
        store.wait(["rank 1 has made both calls"], LIMIT)
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    else:
        with patch.object(Segment, "sleep_until_bell", handle):
            dist.all_reduce(first, group=group)
    return first.unique().tolist(), second.unique().tolist()


def test_a_handler_may_call_while_the_interrupted_call_waits():
    """The call of the handler comes after the interrupted one, on both ranks."""
    assert run_on_ranks(2, handler_while_a_rank_waits) == [([2.0], [20.0])] * 2
