"""Small programs give the same over the backend over shared memory as over gloo.

Each program is a function (rank, ranks) that starts with a process group and returns numbers.
"""

import json
import platform
import re
import time
from datetime import timedelta
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from support import ROOT, run_ranks

Op = dist.ReduceOp
key = [""]  # of the store, another one for each run of a program


def run_over(rank, backend, ranks, programs):
    """What each program returns, or the text of its error, in one group."""
    import shm  # noqa: F401

    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    found = []
    for number, program in enumerate(programs):
        key[0] = f"{backend} {number} {len(programs)}"
        try:
            found.append([torch.as_tensor(value).tolist() for value in program(rank, ranks)])
        except (RuntimeError, TimeoutError, AssertionError) as error:
            found.append(f"{program.__name__}: {error}")
    dist.destroy_process_group()  # so that a rank that waits for an error of another goes on
    return found


def run_all(rank, ranks, programs, controls):
    theirs = run_over(rank, "gloo", ranks, programs)
    ours = run_over(rank, "shm", ranks, programs)
    without = []
    for program, control in zip(programs, controls, strict=True):
        if control:
            with patch.object(*control()):
                without += run_over(rank, "shm", ranks, [program])
        else:
            without.append(None)
    return theirs, ours, without


@cache
def results(ranks):
    """For each program of that many ranks: all ranks' results over gloo, over shm, and over shm
    with the control, which leaves something out.
    """
    table = [row for row in PROGRAMS if row[1] == ranks]
    programs, _, controls = zip(*table, strict=True)
    by_rank = run_ranks(ranks, run_all, ranks, programs, controls)
    found = {}
    for number, program in enumerate(programs):
        found[program.__name__] = [
            [of_rank[which][number] for of_rank in by_rank] for which in range(3)
        ]
    return found


# Autograd: a collective changes values, and no gradient flows through it


def recorded():
    import shm

    return shm, "without_autograd", lambda tensor: tensor


def gradient_of_all_reduce(rank, ranks, op=Op.SUM):
    weight = torch.ones(40_000, requires_grad=True)
    output = weight * (rank + 1)
    dist.all_reduce(output, op)
    output.sum().backward()
    return weight.grad.unique(), output.detach().unique()


def gradient_of_maximum(rank, ranks):
    return gradient_of_all_reduce(rank, ranks, Op.MAX)


def gradient_of_broadcast(rank, ranks):
    weight = torch.ones(5, requires_grad=True)
    output = weight * (rank + 1)
    dist.broadcast(output, 0)
    output.sum().backward()
    return weight.grad, output.detach()


def broadcast_of_a_parameter(rank, ranks):
    parameter = nn.Parameter(torch.full((5,), float(rank)))
    dist.broadcast(parameter, 0)
    dist.all_reduce(parameter)
    return parameter.detach(), parameter.requires_grad, parameter.is_leaf


def outputs_need_no_gradient(rank, ranks):
    x = torch.full((ranks,), rank + 1.0, requires_grad=True)
    parts, whole, one = list(torch.zeros(ranks, ranks)), torch.zeros(ranks * ranks), torch.zeros(1)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x.detach())  # gloo itself raises with x
    dist.reduce_scatter_tensor(one, x.detach())  # its output would need a gradient
    out = torch.zeros(ranks)
    dist.all_to_all_single(out, x)
    first = [torch.zeros(1), torch.zeros(1)]
    dist.scatter(first[0], list(x.split(1)) if rank == 0 else None)
    dist.reduce(x * 1, 0)
    work = dist.isend(x[:1], (rank + 1) % ranks)
    dist.recv(first[1], (rank - 1) % ranks)
    work.wait()
    outputs = [*parts, whole, one, out, *first]
    return *outputs, [each.requires_grad for each in outputs]


def results_of_inference_mode(rank, ranks):
    with torch.inference_mode():
        total = torch.ones(3) * rank
        work = dist.all_reduce(total, async_op=True)
    work.wait()
    dist.all_reduce(total)
    return (total,)


def changes_are_not_counted(rank, ranks):
    weight = torch.ones(3, requires_grad=True)
    output = weight.exp()  # backward uses it as it is then
    dist.all_reduce(output)
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


def without_tags():
    from shm.messages import Letter

    return Letter, "matches", lambda self, source, tag: self.source in (None, source)


def everyone_to_everyone(rank, ranks):
    """Several receives at once, of different sizes."""
    others = [other for other in range(ranks) if other != rank]
    outputs = [torch.zeros(10 + other) for other in others]
    operations = []
    for other, output in zip(others, outputs, strict=True):
        operations.append(dist.P2POp(dist.irecv, output, other))
        operations.append(dist.P2POp(dist.isend, torch.full((10 + rank,), float(rank)), other))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return outputs


def from_any_rank(rank, ranks):
    content, found = torch.zeros(30_000), []
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
            found.append(source)
    return (sorted(found),)


# Everything else that a program asks for


def bitwise(rank, ranks):
    found = []
    for op in (Op.BAND, Op.BOR, Op.BXOR):
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool):
            x = (torch.arange(8) + 3 * rank).to(dtype)
            dist.all_reduce(x, op)
            found.append(x)
    return found


def averages_and_complex_numbers(rank, ranks):
    x, z = torch.arange(5.0) + rank, torch.complex(torch.ones(3), torch.full((3,), float(rank)))
    dist.all_reduce(x, Op.AVG)
    dist.all_reduce(z)
    return x, torch.view_as_real(z)


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


def uneven_parts(rank, ranks):
    inputs = torch.cat([torch.full((other, 2), 10.0 * rank + other) for other in range(ranks)])
    output = torch.zeros(ranks * rank, 2)
    dist.all_to_all_single(output, inputs, [rank] * ranks, [*range(ranks)])
    return (output,)


def by_the_name_of_the_group(rank, ranks):
    x = torch.arange(6.0).view(3, 2) + rank
    world = dist.group.WORLD
    found = [
        functional.all_reduce(x, "sum", world),
        functional.all_gather_tensor(x, 0, world),
        functional.reduce_scatter_tensor(x, "avg", 0, world),
        *functional.all_reduce_coalesced([x, 2 * x], "max", world),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], world),
        functional.all_to_all_single(x, None, None, world),
        functional.broadcast(x, 1, world),
    ]
    return [each + 0 for each in found]  # + 0 waits


def through_autograd_functions(rank, ranks):
    from torch.distributed.nn import functional as differentiable

    x = torch.arange(6.0, requires_grad=True)
    factor = torch.arange(6.0) + rank
    (differentiable.all_reduce(x * factor) * factor).sum().backward()
    first = x.grad.clone()
    (torch.cat(differentiable.all_gather(x * factor)) ** 2).sum().backward()
    return first, x.grad


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


def two_dimensional_mesh(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data", "model"))
    x, y = torch.ones(2) * rank, torch.ones(2) * rank
    dist.all_reduce(x, group=mesh.get_group("data"))
    dist.all_reduce(y, group=mesh.get_group("model"))
    return x, y


def without_a_name():
    import shm

    return shm.SharedMemoryGroup, "getGroupName", lambda self: ""


# Work that is not complete when its call returns


def two_groups_in_another_order(rank, ranks, finish=lambda works: [work.wait() for work in works]):
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.full((300_000,), float(rank)), torch.full((7,), 10.0 * rank)]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(tensors[n], group=groups[n], async_op=True) for n in order]
    finish(works)
    return tensors[0].unique(), tensors[1]


def two_futures_in_another_order(rank, ranks):
    return two_groups_in_another_order(
        rank, ranks, lambda works: [f.wait() for f in [work.get_future() for work in works]]
    )


def complete_without_a_wait(rank, ranks):
    """Rank 0 starts a call and then does something else until rank 1 has the result."""
    store = dist.distributed_c10d._get_default_store()
    x, y = torch.full((100_000,), 7.0 + rank), torch.zeros(100_000)
    dist.barrier()
    if rank == 0:
        works = [dist.isend(x, 1), dist.all_reduce(y, async_op=True)]
        store.wait([key[0]], timedelta(seconds=20))
    else:
        dist.recv(x, 0)
        works = [dist.all_reduce(y, async_op=True)]
        works[0].wait()
        store.set(key[0], "")
    for work in works:
        work.wait()
    return x.unique(), y.unique()


def nobody_attends():
    from shm.work import progress

    return progress, "attend", lambda: None


def one_after_the_other(rank, ranks):
    """Calls of one group are carried out in the order in which they were made."""
    tensors = [torch.full((5,), float(rank + n)) for n in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


def always_waits_for_a_second():
    """With calls that wait until they are complete, these programs hang."""
    from shm.work import progress

    start = progress.start

    def limited(line, work, wait):
        work.limit = timedelta(seconds=1)
        return start(line, work, True)

    return progress, "start", limited


def hooks(rank, ranks):
    """DDP with hooks that use the future of a call, and of a call in a callback of a future."""

    def average(_, bucket):
        work = dist.all_reduce(bucket.buffer().div_(ranks), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    found = []
    for hook, state in ((average, None), (powerSGD_hook, None)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        if hook is powerSGD_hook:
            state = PowerSGDState(None, 1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hook)
        torch.manual_seed(rank)
        with ddp.no_sync():
            ddp(torch.rand(3, 40)).sum().backward()
        for _ in range(4):
            ddp(torch.rand(3, 40)).sum().backward()
        found += [p.grad for p in model.parameters()]
    return found


def callback_that_waits(rank, ranks):
    """A callback of a call's future may call, and wait, too."""
    x, y = torch.ones(3), torch.full((3,), float(rank))
    if rank > 0:
        time.sleep(0.1)  # so that rank 0's future is not complete at once

    def again(future):
        dist.all_reduce(y, async_op=True).get_future().wait()
        return future.value()[0]

    return dist.all_reduce(x, async_op=True).get_future().then(again).wait(), y


def impatient(rank, ranks):
    """Wait for 0.2 s for what another rank starts later: an error, and the work goes on."""
    store = dist.distributed_c10d._get_default_store()
    x, errors = torch.full((3,), float(rank)), 0
    if rank == 0:
        for work in (dist.irecv(x, 1), dist.barrier(async_op=True)):
            before = time.monotonic()
            try:
                work.wait(timedelta(seconds=0.2))
            except (RuntimeError, TimeoutError):
                errors += 1
            assert time.monotonic() - before >= 0.2
            if errors == 2:
                store.set(key[0], "")
            last = work
        last.wait()
    else:
        store.wait([key[0]], timedelta(seconds=20))
        dist.send(x, 0)
        dist.barrier()
    return (errors,)


def monitored(rank, ranks):
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    found = []
    for everyone in (False, True):
        error = ""
        try:
            if rank == 0:
                dist.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=everyone)
        except RuntimeError as caught:
            error = str(caught).partition("failed")[0].partition("Rank 0]: Rank")[2]
        found.append([int(digit) for digit in error if digit.isdigit()])
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return found


# What it refuses, and processors that reorder writes


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
    ]
    errors = [error_of(*call) for call in calls]
    dist.all_reduce(whole)  # the group is as good as before
    return [list(error.encode()) for error in errors]


def many_sizes(rank, ranks):
    """With the barrier that other processors need between data and counter."""
    import shm.segment

    group = dist.group.WORLD
    barrier = shm.segment.system_barrier(324)  # membarrier's number on x86-64
    called, found = [], []
    if dist.get_backend() == "shm" and platform.machine() == "x86_64":
        group.segment.barrier = lambda: called.append(barrier())
    for size in (1, 1000, 400_000):
        x = torch.arange(float(size)) * (rank + 1)
        dist.all_reduce(x)
        found.append(x)
    assert called == [0] * len(called)
    return found


PROGRAMS = [  # with how many ranks, and the control, without which it gives something else
    (gradient_of_all_reduce, 3, recorded),
    (gradient_of_maximum, 3, recorded),
    (gradient_of_broadcast, 3, recorded),
    (broadcast_of_a_parameter, 3, recorded),
    (outputs_need_no_gradient, 3, recorded),
    (results_of_inference_mode, 3, recorded),
    (changes_are_not_counted, 3, recorded),
    (tags_in_another_order, 3, without_tags),
    (everyone_to_everyone, 3, None),
    (from_any_rank, 3, None),
    (bitwise, 3, None),
    (averages_and_complex_numbers, 3, None),
    (sparse, 3, None),
    (nothing_at_all, 3, None),
    (uneven_parts, 3, None),
    (by_the_name_of_the_group, 3, without_a_name),
    (through_autograd_functions, 3, None),
    (sharded, 3, without_a_name),
    (two_dimensional_mesh, 3, None),
    (two_groups_in_another_order, 2, always_waits_for_a_second),
    (two_futures_in_another_order, 2, always_waits_for_a_second),
    (complete_without_a_wait, 2, nobody_attends),
    (one_after_the_other, 2, None),
    (hooks, 2, None),
    (callback_that_waits, 2, None),
    (many_sizes, 2, None),
]


@pytest.mark.parametrize(("program", "ranks", "control"), PROGRAMS)
def test_a_program_gives_the_same_over_it_as_over_gloo(program, ranks, control):
    theirs, ours, without = results(ranks)[program.__name__]
    assert not any(isinstance(result, str) for result in theirs), "gloo raises"
    assert same(ours, theirs)
    if control:
        assert not same(without, theirs), "the control"


def only_over_shm(rank, program, ranks):
    return run_over(rank, "shm", ranks, [program])[0]


def same(ours, theirs):
    """gloo adds up in another order, so the last digits may differ."""
    if isinstance(ours, list) and len(ours) == len(theirs):
        return all(map(same, ours, theirs))
    return (
        ours == theirs
        if isinstance(ours, (str, list))
        else abs(ours - theirs) <= 1e-5 * abs(theirs)
    )


def test_wait_ends_after_its_timeout_and_the_work_goes_on():
    assert run_ranks(2, only_over_shm, impatient, 2) == [[2], [0]]


def test_monitored_barrier_names_who_is_late():
    alone, *others = run_ranks(3, only_over_shm, monitored, 3)
    assert alone == [[1], [1, 2]]
    assert others == [[[], []]] * 2


def test_what_it_refuses_ends_in_one_line_and_leaves_the_group_as_it_was():
    for errors in run_ranks(2, only_over_shm, refused, 2):
        lines = [bytes(error).decode() for error in errors]
        assert [line.partition(", expected ")[0] for line in lines] == [
            "shm: got RedOpType.AVG of torch.int64",
            "shm: got RedOpType.BAND of torch.float32",
            "shm: got RedOpType.MAX of a sparse tensor",
            "shm: got a tensor of torch.strided, on meta",
            "shm: got 5 elements of torch.float32",
            "shm: got 5",
        ]
        assert not any("\n" in line for line in lines)


def test_a_processor_whose_order_is_unknown_is_refused():
    import shm.segment

    with patch("platform.machine", lambda: "s390x"), pytest.raises(RuntimeError) as caught:
        shm.segment.memory_barrier()
    assert str(caught.value).startswith("shm: got s390x without membarrier(2), expected x86-64")


def test_the_page_shows_the_counts_of_torchs_suite():
    found = json.loads((ROOT / "benchmarks" / "results" / "shm_suite.json").read_text())
    page = (ROOT / "03_ddp_manual_allreduce" / "backend.md").read_text()
    for run, counts in found["tests"].items():
        assert re.search(rf"\| {run} +\| {counts['passed']} +\| {counts['failed']} +\|", page), run
    assert found["wrong"] == []
