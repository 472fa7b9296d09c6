"""Small programs give the same over the backend over shared memory as over gloo.

All programs of shm_programs.py run in one start of three ranks: over gloo, over shm, and some of
them over shm with one thing left out, without which they give something else.
"""

import json
import re
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
import torch_suite
from shm_programs import (
    KNOWN,
    OF_AUTOGRAD,
    PROGRAMS,
    complete_without_a_wait,
    impatient,
    messages_with_gaps,
    monitored,
    refused,
    sharded,
    tags_in_another_order,
    two_groups_in_another_order,
)
from shm_ranks import run_on_ranks

HERE = Path(__file__).parent
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
    """What each program returns, or the text of its error, in one group."""
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
    results_by_way["shm"] = run_over("shm", rank, [*PROGRAMS, *KNOWN])
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


def test_wait_ends_after_its_timeout_and_the_work_goes_on():
    errors, message = results("shm", impatient)[0]
    assert errors == 2
    assert message == [1.0, 1.0, 1.0], "of rank 1"


def test_messages_with_gaps_arrive_and_leave_the_gaps_as_they_were():
    assert results("shm", messages_with_gaps) == [[True], [True, True], [True]]


def test_monitored_barrier_names_who_is_late():
    alone, *others = results("shm", monitored)
    if alone == "error: monitored_barrier is only implemented for GLOO backend.":
        pytest.skip("needs a torch that lets other backends have a monitored_barrier")
    assert alone == [[1], [1, 2]]
    assert others == [[[], []]] * 2


def test_what_shm_refuses_ends_in_one_line_and_leaves_the_group_as_it_was():
    for errors in results("shm", refused):
        lines = [bytes(error).decode() for error in errors]
        assert [line.partition(", expected ")[0] for line in lines] == [
            "shm: got RedOpType.AVG of torch.int64",
            "shm: got RedOpType.BAND of torch.float32",
            "shm: got RedOpType.MAX of a sparse tensor",
            "shm: got a tensor of torch.strided, on meta",
            "shm: got 5 elements of torch.float32",
            "shm: got 5",
            "shm: got strides (1, 0) of (3, 2)",
            *["shm: got strides (0,) of (4,)"] * 7,
        ]
        assert not any("\n" in line for line in lines)


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


def test_the_counts_of_torchs_suite_name_the_command_that_makes_them():
    where = json.loads((HERE / "torch_suite.json").read_text())["provenance"]
    assert where["command"] == torch_suite.COMMAND
