"""Small programs give the same over the backend over shared memory as over gloo.

Each program is a function (rank, ranks) that starts with a process group and returns numbers. All
of them run in one start of three ranks: over gloo, over shm, and some of them over shm with one
thing left out, without which they give something else.
"""

import json
import platform
import re
import time
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shm
import shm.messages
import shm.segment
import shm.tensors
import shm.work
from helpers.local_ranks import run_on_ranks

HERE, Op = Path(__file__).parent, dist.ReduceOp
RANKS = 3
PATIENCE = timedelta(seconds=10)  # of a rank that waits for what must happen meanwhile


def note(name: str) -> tuple[dist.Store, str]:
    """The store where ranks meet outside the group, and a key of this program."""
    return dist.distributed_c10d._get_default_store(), f"{dist.get_backend()} {name}"


# Autograd: a collective changes values, and no gradient flows through it


def gradients_before_a_collective(rank, ranks):
    sums, largest = dist.all_reduce, partial(dist.all_reduce, op=Op.MAX)
    tensors = []
    for collective in (sums, largest, partial(dist.broadcast, src=0)):
        weight = torch.ones(40_000, requires_grad=True)
        output = weight * (rank + 1)
        collective(output)
        output.sum().backward()
        tensors += [weight.grad.unique(), output.detach().unique()]
    return tensors


def broadcast_of_a_parameter(rank, ranks):
    parameter = nn.Parameter(torch.full((5,), float(rank)))
    dist.broadcast(parameter, 0)
    dist.all_reduce(parameter)
    return parameter.detach(), parameter.requires_grad, parameter.is_leaf


def outputs_need_no_gradient(rank, ranks):
    x = torch.full((ranks,), rank + 1.0, requires_grad=True)
    parts, exchanged = list(torch.zeros(ranks, ranks)), torch.zeros(ranks)
    dist.all_gather(parts, x)
    dist.all_to_all_single(exchanged, x)
    scattered, received = torch.zeros(1), torch.zeros(1)
    dist.scatter(scattered, list(x.split(1)) if rank == 0 else None)
    dist.reduce(x * 1, 0)
    work = dist.isend(x[:1], (rank + 1) % ranks)
    dist.recv(received, (rank - 1) % ranks)
    work.wait()
    outputs = [*parts, exchanged, scattered, received]
    return *outputs, [each.requires_grad for each in outputs]


def changes_are_not_counted(rank, ranks):
    weight = torch.ones(3, requires_grad=True)
    output = weight.exp()  # backward uses it as it is then
    dist.all_reduce(output)
    dist.all_reduce(output, Op.MAX)  # not in C, which counts no change anyway
    output.sum().backward()
    return (weight.grad,)


# Messages


def tags_in_another_order(rank, ranks):
    first, second, third = torch.zeros(3), torch.zeros(50_000), torch.zeros(2)
    if rank == 0:
        works = [dist.isend(torch.full_like(x, n), 1, tag=n) for n, x in ((1, first), (2, second))]
        works.append(dist.isend(torch.full_like(third, 3), 1, tag=1))
        for work in works:
            work.wait()
    elif rank == 1:
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        dist.recv(third, 0, tag=1)
    return first, second.unique(), third


def from_any_rank(rank, ranks):
    content, sources = torch.zeros(30_000), []
    if rank > 0:
        dist.send(torch.full_like(content, rank), 0)
        dist.send(torch.full_like(content, rank), 0)
    else:
        for turn in range(2 * (ranks - 1)):
            if turn % 2:
                source = dist.recv(content)
            else:
                work = dist.irecv(content)
                work.wait()
                source = work._source_rank()
            assert (content == source).all()
            sources.append(source)
    return (sorted(sources),)


# Everything else that a program asks for


def bitwise(rank, ranks):
    tensors = []
    for op in (Op.BAND, Op.BOR, Op.BXOR):
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool):
            x = (torch.arange(8) + 3 * rank).to(dtype)
            dist.all_reduce(x, op)
            tensors.append(x)
    return tensors


def sparse(rank, ranks):
    indices, values = torch.tensor([[0, rank, rank + 1], [1, 0, 1]]), torch.arange(6.0).view(3, 2)
    x = torch.sparse_coo_tensor(indices, values + rank, (5, 2, 2), check_invariants=True)
    dist.all_reduce(x)
    empty = torch.sparse_coo_tensor(size=(4,), check_invariants=True)
    dist.all_reduce(empty)
    return x.to_dense(), empty.to_dense()


def nothing_at_all(rank, ranks):
    output = torch.empty(0)
    dist.all_to_all_single(output, torch.empty(0))
    dist.all_reduce(output)
    parts = [torch.empty(0) for _ in range(ranks)]
    dist.all_gather(parts, output)
    return output, *parts


def sharded(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(rank)
    for _ in range(2):
        model(torch.rand(4, 6)).square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


# Work that is not complete when its call returns


def two_groups_in_another_order(rank, ranks):
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.full((300_000,), float(rank)), torch.full((7,), 10.0 * rank)]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(tensors[n], group=groups[n], async_op=True) for n in order]
    for work in works:
        work.wait()
    return tensors[0].unique(), tensors[1]


def complete_without_a_wait(rank, ranks):
    """Rank 0 starts two calls of several pieces, and does something else until rank 1 has them."""
    store, key = note("rank 1 has the results")
    x, y = torch.full((2_000_000,), 7.0 + rank), torch.zeros(2_000_000)
    dist.barrier()
    if rank == 0:
        message = dist.isend(x, 1)
    if rank == 1:
        dist.recv(x, 0)
    total = dist.all_reduce(y, async_op=True)
    if rank == 0:
        store.wait([key], PATIENCE)
        store.delete_key(key)  # the control runs this program again
        message.wait()
    total.wait()
    if rank == 1:
        store.set(key, "")
    return x.unique(), y.unique()


def hooks(rank, ranks):
    """DDP with hooks that use the future of a call; PowerSGD calls again in its callback."""

    def average(_, bucket):
        work = dist.all_reduce(bucket.buffer().div_(ranks), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    gradients = []
    power_sgd = PowerSGDState(None, 1, start_powerSGD_iter=2)
    for hook, state in ((average, None), (powerSGD_hook, power_sgd)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        ddp.register_comm_hook(state, hook)
        torch.manual_seed(rank)
        for _ in range(4):
            ddp(torch.rand(3, 40)).sum().backward()
        gradients += [p.grad for p in model.parameters()]
    return gradients


def futures_of_one_call(rank, ranks):
    """Rank 0 asks for two futures before the others come, and for one after the end."""
    store, key = note("rank 0 has two futures")
    x = torch.full((3,), rank + 1.0)
    if rank > 0:
        store.wait([key], timedelta(seconds=20))
    work = dist.all_reduce(x, async_op=True)
    futures = [work.get_future(), work.get_future()]
    if rank == 0:
        store.set(key, "")
    work.wait()
    futures.append(work.get_future())
    deadline = time.monotonic() + 5
    while not all(future.done() for future in futures) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(future.done() for future in futures), [future.done() for future in futures]
    return x, *(future.value()[0] for future in futures)


# Processors that reorder writes


def many_sizes(rank, ranks):
    """With the barrier that other processors need between data and counter."""
    barrier = shm.segment.system_barrier(324)  # membarrier's number on x86-64
    called, tensors = [], []
    if dist.get_backend() == "shm" and platform.machine() == "x86_64":
        dist.group.WORLD.segment.barrier = lambda: called.append(barrier())
    for size in (1, 1000, 400_000):
        x = torch.arange(float(size)) * (rank + 1)
        dist.all_reduce(x)
        tensors.append(x)
    assert called == [0] * len(called)
    return tensors


OF_AUTOGRAD = [gradients_before_a_collective, broadcast_of_a_parameter, outputs_need_no_gradient]
OF_AUTOGRAD += [changes_are_not_counted]
OF_MESSAGES = [tags_in_another_order, from_any_rank]
OF_CALLS = [bitwise, sparse, nothing_at_all, sharded]
OF_STARTED_WORK = [two_groups_in_another_order, complete_without_a_wait, hooks, futures_of_one_call]
PROGRAMS = [*OF_AUTOGRAD, *OF_MESSAGES, *OF_CALLS, *OF_STARTED_WORK, many_sizes]


# What is left out, and the programs that then give something else


def wait_for_a_second_in_each_call(queue, work, wait, start=shm.work.pending.start):
    work.limit = timedelta(seconds=1)
    return start(queue, work, True)


def take_any_tag(request, source, tag):
    return request.source in (None, source)


LEFT_OUT = {
    "no_grad": ((shm.tensors, "without_autograd", lambda tensor: tensor), OF_AUTOGRAD),
    "tags": ((shm.messages.Message, "matches", take_any_tag), [tags_in_another_order]),
    "the name of the group": ((shm.SharedMemoryGroup, "getGroupName", lambda _: ""), [sharded]),
    "calls that return at once": (
        (shm.work.pending, "start", wait_for_a_second_in_each_call),
        [two_groups_in_another_order],
    ),
    "the thread that goes on with started calls": (
        (shm.work.pending, "wake_thread", lambda: None),
        [complete_without_a_wait],
    ),
}


# Programs whose results over shm alone are known


def impatient(rank, ranks):
    """Rank 0 waits for 0.2 s for what the others start later: an error, and the work goes on."""
    store, key = note("rank 0 has waited")
    x, errors = torch.full((3,), float(rank)), 0
    if rank > 0:
        store.wait([key], timedelta(seconds=20))
        if rank == 1:
            dist.send(x, 0)
        dist.barrier()
        return (errors,)
    works = dist.irecv(x, 1), dist.barrier(async_op=True)
    for work in works:
        before = time.monotonic()
        try:
            work.wait(timedelta(seconds=0.2))
        except (RuntimeError, TimeoutError):
            errors += 1
        assert time.monotonic() - before >= 0.2
    store.set(key, "")
    for work in works:
        work.wait()
    return (errors, x)


def monitored(rank, ranks):
    """Only rank 0 comes to two of the barriers: which ranks it misses."""
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    ranks_named = []
    for everyone in (False, True):
        error = ""
        try:
            if rank == 0:
                dist.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=everyone)
        except RuntimeError as caught:
            error = str(caught).partition("failed")[0].partition("Rank 0]: Rank")[2]
        ranks_named.append([int(digit) for digit in error if digit.isdigit()])
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return ranks_named


def messages_with_gaps(rank, ranks):
    """Rank 0 sends what does not lie side by side, rank 1 receives into it; gloo refuses both."""
    grid = torch.arange(40_000.0).view(-1, 4)
    empty = torch.zeros_like(grid)
    received = [empty[:, 1], empty[::2, 2:], empty[:1, 3:][::2, 0], torch.zeros(3, 2)]
    sent = [
        grid[:, 1],
        grid[::2, 2:],
        grid[:1, 3:][::2, 0],
        torch.arange(3.0).view(3, 1).expand(3, 2),
    ]
    for ours, theirs in zip(sent, received, strict=True):
        if rank == 0:
            dist.send(ours, 1)
        elif rank == 1:
            dist.recv(theirs, 0)
    if rank != 1:
        return (True,)
    expected = torch.zeros_like(grid)
    expected[:, 1], expected[::2, 2:], expected[0, 3] = sent[0], sent[1], grid[0, 3]
    return torch.equal(empty, expected), torch.equal(received[3], sent[3])


def error_of(call, *arguments):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call(*arguments)
    return str(caught.value)


def refused(rank, ranks):
    whole, x = torch.zeros(3, dtype=torch.int64), torch.zeros(4)
    empty = [torch.zeros(5) for _ in range(ranks)]
    calls = [
        (dist.all_reduce, whole, Op.AVG),
        (dist.all_reduce, x, Op.BAND),
        (dist.all_reduce, x.to_sparse(), Op.MAX),
        (dist.all_reduce, torch.zeros(3, device="meta")),
        (dist.all_gather, empty, x),
        (dist.all_to_all_single, torch.zeros(5), torch.zeros(5)),
        (dist.recv, torch.zeros(3, 1).expand(3, 2), (rank + 1) % ranks),
    ]
    errors = [error_of(*call) for call in calls]
    dist.all_reduce(whole)  # the group is as good as before
    return [list(error.encode()) for error in errors]


KNOWN = [impatient, monitored, messages_with_gaps, refused]


def run_over(backend, rank, programs):
    """What each program returns, or the text of its error, in one group."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    results_by_program = {}
    for program in programs:
        try:
            results = [torch.as_tensor(value).tolist() for value in program(rank, RANKS)]
        except (RuntimeError, TimeoutError, AssertionError) as error:
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
            with patch.object(*place), patch.dict(globals(), PATIENCE=timedelta(seconds=2)):
                results_by_way[what] |= run_over("shm", rank, [program])
    return results_by_way


@cache
def results_of_all_programs():
    return run_on_ranks(RANKS, run_all)


def results(how, program):
    """Of each rank."""
    return [results_of_rank[how][program.__name__] for results_of_rank in results_of_all_programs()]


def same(ours, theirs):
    """gloo adds up in another order, so the last digits may differ."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= 1e-5 * abs(theirs)
    return ours == theirs


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_the_same_over_it_as_over_gloo(program):
    over_gloo = results("gloo", program)
    assert not any(isinstance(result, str) for result in over_gloo), over_gloo
    assert same(results("shm", program), over_gloo)


@pytest.mark.parametrize("what", LEFT_OUT)
def test_without_it_a_program_gives_something_else(what):
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
    assert alone == [[1], [1, 2]]
    assert others == [[[], []]] * 2


def test_what_it_refuses_ends_in_one_line_and_leaves_the_group_as_it_was():
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
        ]
        assert not any("\n" in line for line in lines)


def test_a_processor_whose_order_is_unknown_is_refused():
    with patch("platform.machine", lambda: "s390x"), pytest.raises(RuntimeError) as caught:
        shm.segment.memory_barrier()
    assert str(caught.value).startswith("shm: got s390x without membarrier(2), expected x86-64")


def test_the_page_shows_the_counts_of_torchs_suite():
    suite = json.loads((HERE / "torch_suite.json").read_text())
    page = (HERE.parent / "README.md").read_text()
    for run, counts in suite["tests"].items():
        assert re.search(rf"\| {run} +\| {counts['passed']} +\| {counts['failed']} +\|", page), run
    assert suite["wrong"] == []
