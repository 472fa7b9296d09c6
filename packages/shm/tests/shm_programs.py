"""Programs for test_shm_programs.py: each is a function (rank, ranks) that returns numbers.

It starts with a process group, over gloo or over shm.
"""

import platform
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shm.segment

Op = dist.ReduceOp
PATIENCE = timedelta(seconds=10)  # a rank waits so long for what must happen meanwhile


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
    """Sum tensors of three sizes, with the barrier that other processors need before a counter."""
    barrier = shm.segment.system_fence(324)  # membarrier's number on x86-64
    called, tensors = [], []
    if dist.get_backend() == "shm" and platform.machine() == "x86_64":
        dist.group.WORLD.segment.fence = lambda: called.append(barrier())
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
    whole, x, expanded = torch.zeros(3, dtype=torch.int64), torch.zeros(4), torch.ones(1).expand(4)
    empty = [torch.zeros(5) for _ in range(ranks)]
    calls = [
        (dist.all_reduce, whole, Op.AVG),
        (dist.all_reduce, x, Op.BAND),
        (dist.all_reduce, x.to_sparse(), Op.MAX),
        (dist.all_reduce, torch.zeros(3, device="meta")),
        (dist.all_gather, empty, x),
        (dist.all_to_all_single, torch.zeros(5), torch.zeros(5)),
        (dist.recv, torch.zeros(3, 1).expand(3, 2), (rank + 1) % ranks),
        (dist.all_reduce, expanded),
        (dist.broadcast, expanded, 0),
        (dist.reduce, expanded, 0),
        (dist.all_gather, [*empty[1:], expanded], x),
        (dist.all_to_all, [expanded] * ranks, [x] * ranks),
        (dist.reduce_scatter, expanded, [x] * ranks),
        (dist.scatter, expanded, [x] * ranks if rank == 0 else None),
    ]
    errors = [error_of(*call) for call in calls]
    dist.all_reduce(whole)  # the group is as good as before
    return [list(error.encode()) for error in errors]


KNOWN = [impatient, monitored, messages_with_gaps, refused]
