"""Small programs give the same over the backend over shared memory as over gloo.

All programs of shm_programs.py run in one start of three ranks: over gloo, over shm, and some of
them over shm with one thing left out, without which they give something else.
"""

import json
import re
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shm
import shm.messages
import shm.segment
import shm.tensors
import shm.work
import shm_programs
from shm_cases import outcome_of
from shm_programs import (
    OF_AUTOGRAD,
    PROGRAMS,
    complete_without_a_wait,
    sharded,
    tags_in_another_order,
    two_groups_in_another_order,
)
from shm_ranks import on_ranks, run_on_ranks

HERE = Path(__file__).parent
Op = dist.ReduceOp
RANKS = 3


# What is left out, and the programs that then give something else


def wait_for_a_second_in_each_call(work, wait, carry_on=shm.work.scheduler.carry_on):
    work.options = dist.BarrierOptions()
    work.options.timeout = timedelta(seconds=1)
    return carry_on(work, True)


def take_any_tag(request, source, tag):
    return request.source in (None, source)


LEFT_OUT = {
    "no_grad": ((shm.tensors, "without_autograd", lambda tensor: tensor), OF_AUTOGRAD),
    "tags": ((shm.messages.Message, "matches", take_any_tag), [tags_in_another_order]),
    "the name of the group": ((shm.SharedMemoryGroup, "getGroupName", lambda _: ""), [sharded]),
    "calls that return at once": (
        (shm.work.scheduler, "carry_on", wait_for_a_second_in_each_call),
        [two_groups_in_another_order],
    ),
    "the thread that goes on with started calls": (
        (shm.work.scheduler, "wake_thread", lambda: None),
        [complete_without_a_wait],
    ),
}


def run_over(backend, rank, programs):
    """Return the result of each program, or the text of its error, in one group."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    results_by_program = {}
    for program in programs:
        try:
            results = [torch.as_tensor(value).tolist() for value in program(rank, RANKS)]
        except (RuntimeError, TimeoutError, AssertionError, ValueError) as error:
            results = f"error: {error}"
        results_by_program[program.__name__] = results
    dist.destroy_process_group()  # so that a rank that waits for an error of another goes on
    return results_by_program


def run_all(rank):
    results_by_way = {"gloo": run_over("gloo", rank, PROGRAMS)}
    results_by_way["shm"] = run_over("shm", rank, PROGRAMS)
    for what, (place, programs) in LEFT_OUT.items():
        results_by_way[what] = {}
        for program in programs:  # each in a group of its own, which an error may leave unusable
            with patch.object(*place), patch.object(shm_programs, "PATIENCE", timedelta(seconds=2)):
                results_by_way[what] |= run_over("shm", rank, [program])
    return results_by_way


@cache
def results_of_all_programs():
    return run_on_ranks(RANKS, run_all)


def results(how, program):
    """Return what this program gave on each rank."""
    return [results_of_rank[how][program.__name__] for results_of_rank in results_of_all_programs()]


def same(ours, theirs):
    """gloo adds up in another order, so the last digits may differ."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= 1e-5 * abs(theirs)
    return ours == theirs


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_the_same_over_shm_as_over_gloo(program):
    over_gloo = results("gloo", program)
    assert not any(isinstance(result, str) for result in over_gloo), over_gloo
    assert same(results("shm", program), over_gloo)


@pytest.mark.parametrize("what", LEFT_OUT)
def test_with_a_part_of_shm_left_out_a_program_gives_something_else(what):
    """The controls."""
    for program in LEFT_OUT[what][1]:
        assert not same(results(what, program), results("gloo", program)), program.__name__


# Programs that gloo refuses, or whose result is an error


@on_ranks(3, "shm")
def test_wait_ends_after_its_timeout_and_the_work_goes_on(rank):
    """Rank 0 waits for 0.2 s for what the others start later."""
    store, x = dist.distributed_c10d._get_default_store(), torch.full((3,), float(rank))
    if rank > 0:
        store.wait(["rank 0 has waited"], timedelta(seconds=20))
        if rank == 1:
            dist.send(x, 0)
        dist.barrier()
        return
    works = dist.irecv(x, 1), dist.barrier(async_op=True)
    for work in works:
        before = time.monotonic()
        with pytest.raises((RuntimeError, TimeoutError)):
            work.wait(timedelta(seconds=0.2))
        assert time.monotonic() - before >= 0.2
    store.set("rank 0 has waited", "")
    for work in works:
        work.wait()
    assert x.tolist() == [1.0, 1.0, 1.0], "of rank 1"


@on_ranks(3, "shm")
def test_messages_with_gaps_arrive_and_leave_the_gaps_as_they_were(rank):
    grid, column = torch.arange(40_000.0).view(-1, 4), torch.arange(3.0).view(3, 1)
    empty = torch.zeros_like(grid)
    sent = [grid[:, 1], grid[::2, 2:], grid[:1, 3:][::2, 0], column.expand(3, 2)]
    received = [empty[:, 1], empty[::2, 2:], empty[:1, 3:][::2, 0], torch.zeros(3, 2)]
    for ours, theirs in zip(sent, received, strict=True):
        if rank == 0:
            dist.send(ours, 1)
        elif rank == 1:
            dist.recv(theirs, 0)
    if rank == 1:
        expected = torch.zeros_like(grid)
        expected[:, 1], expected[::2, 2:], expected[0, 3] = sent[0], sent[1], grid[0, 3]
        assert torch.equal(empty, expected)
        assert torch.equal(received[3], sent[3])


def ranks_named_by_monitored_barrier(rank):
    """Return the ranks that two barriers miss to which only rank 0 comes; None if torch refuses."""
    dist.init_process_group("shm")
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    except ValueError as error:
        if str(error) != "monitored_barrier is only implemented for GLOO backend.":
            raise
        return None
    named = []
    for everyone in (False, True) if rank == 0 else ():
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=everyone)
        named.append(str(caught.value).partition(" failed")[0])
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return named


def test_monitored_barrier_names_who_is_late():
    named, *others = run_on_ranks(3, ranks_named_by_monitored_barrier)
    if named is None:
        pytest.skip("needs a torch that lets other backends have a monitored_barrier")
    assert named == ["shm: [Rank 0]: Rank 1", "shm: [Rank 0]: Ranks 1, 2"]
    assert others == [[], []]


@on_ranks(3, "shm")
def test_what_shm_refuses_ends_in_one_line_and_leaves_the_group_as_it_was(rank):
    whole, x, expanded = torch.zeros(3, dtype=torch.int64), torch.zeros(4), torch.ones(1).expand(4)
    empty = [torch.zeros(5) for _ in range(3)]
    many = "strides (0,) of (4,)"
    for got, *call in (
        ("RedOpType.AVG of torch.int64", dist.all_reduce, whole, Op.AVG),
        ("RedOpType.BAND of torch.float32", dist.all_reduce, x, Op.BAND),
        ("RedOpType.MAX of a sparse tensor", dist.all_reduce, x.to_sparse(), Op.MAX),
        ("a tensor of torch.strided, on meta", dist.all_reduce, torch.zeros(3, device="meta")),
        ("5 elements of torch.float32", dist.all_gather, empty, x),
        ("5", dist.all_to_all_single, torch.zeros(5), torch.zeros(5)),
        ("strides (1, 0) of (3, 2)", dist.recv, torch.zeros(3, 1).expand(3, 2), (rank + 1) % 3),
        (many, dist.all_reduce, expanded),
        (many, dist.broadcast, expanded, 0),
        (many, dist.reduce, expanded, 0),
        (many, dist.all_gather, [*empty[1:], expanded], x),
        (many, dist.all_to_all, [expanded] * 3, [x] * 3),
        (many, dist.reduce_scatter, expanded, [x] * 3),
        (many, dist.scatter, expanded, [x] * 3 if rank == 0 else None),
    ):
        error = outcome_of(*call)
        assert error.partition(": ")[2].partition(", expected ")[0] == f"shm: got {got}"
        assert "\n" not in error
    dist.all_reduce(whole)


def test_a_processor_whose_order_is_unknown_is_refused():
    with patch("platform.machine", lambda: "s390x"), pytest.raises(RuntimeError) as caught:
        shm.segment.memory_fence()
    assert str(caught.value).startswith("shm: got s390x without membarrier(2), expected x86-64")


def test_the_page_shows_the_counts_of_torchs_suite():
    suite = json.loads((HERE / "torch_suite.json").read_text())
    page = (HERE.parent / "README.md").read_text()
    for run, counts in suite["tests"].items():
        assert re.search(rf"\| {run} +\| {counts['passed']} +\| {counts['failed']} +\|", page), run
    assert suite["wrong"] == []
