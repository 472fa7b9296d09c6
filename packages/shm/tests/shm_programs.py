"""Programs for test_shm_programs.py: each is a function (rank, ranks) that returns numbers.

It finds a process group, over gloo or over shm.
"""

import platform
import time
from datetime import timedelta
from functools import partial

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
    """Return the store where ranks meet outside the group, and a key of this program."""
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
    """Train with DDP and with hooks that use a call's future; PowerSGD calls in its callback."""

    def average(_, bucket):
        work = dist.all_reduce(bucket.buffer().div_(ranks), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    gradients = []
    power_sgd = PowerSGDState(None, 1, start_powerSGD_iter=2)
    for hook, state in ((None, None), (average, None), (powerSGD_hook, power_sgd)):
        torch.manual_seed(rank)  # DDP replaces these weights by those of rank 0
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        if hook:
            ddp.register_comm_hook(state, hook)
        with ddp.no_sync():
            ddp(torch.rand(3, 40)).sum().backward()
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
OF_CALLS = [bitwise, sparse, sharded]
OF_STARTED_WORK = [two_groups_in_another_order, complete_without_a_wait, hooks, futures_of_one_call]
PROGRAMS = [*OF_AUTOGRAD, *OF_MESSAGES, *OF_CALLS, *OF_STARTED_WORK, many_sizes]
