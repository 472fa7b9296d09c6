"""The backend over shared memory computes what gloo computes; where it cannot, it says so."""

import os
import random
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from support import ROOT, _train, run_ranks, train_once

Op = dist.ReduceOp
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES += [torch.uint8, torch.int8, torch.int32, torch.int64]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (400_000,)]  # the last one goes in pieces


def collect(number, group, x, op, root, rank, ranks):
    """Call the collective of that number; its name and what this rank has afterwards."""
    mine, empty = rank == root, [torch.empty_like(x) for _ in range(ranks)]
    parts = [x + other for other in range(ranks)]
    call, arguments, result = [
        (dist.all_reduce, (x, op), [x]),
        (dist.broadcast, (x, root), [x]),
        (dist.reduce, (x, root, op), [x] * mine),
        (dist.gather, (x, empty if mine else None, root), empty * mine),
        (dist.scatter, (empty[0], parts if mine else None, root), empty[:1]),
        (dist.reduce_scatter, (empty[0], parts, op), empty[:1]),
        (dist.all_to_all, (empty, parts), empty),
        (dist.all_gather, (empty, x), empty),
    ][number]
    call(*arguments, group=group)
    return call.__name__, result


def compare(rank, ranks, forget):
    """Random collectives over both backends: those whose results differ."""
    import shm
    from shm.exchange import Exchange

    if forget:  # the control: another rank's part is not added
        patch.object(Exchange, "combined", lambda self, rows, op: rows[self.rank].clone()).start()
    assert shm.SharedMemoryGroup
    dist.init_process_group("gloo")
    groups, draw, differ = (dist.group.WORLD, dist.new_group(backend="shm")), random.Random(0), []
    for turn in range(40):
        dtype, shape, root = draw.choice(DTYPES), draw.choice(SHAPES), draw.randrange(ranks)
        op, number = draw.choice([Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]), draw.randrange(8)
        x = 3 * torch.rand(shape, generator=torch.Generator().manual_seed(turn + rank))
        x = x.to(dtype).t() if len(shape) == 2 and number < 2 else x.to(dtype)  # not contiguous
        (name, ours), (_, theirs) = (
            collect(number, group, x.clone(), op, root, rank, ranks) for group in groups
        )
        digits = 1e-5 if not dtype.is_floating_point else ranks * torch.finfo(dtype).eps
        for our, their in zip(ours, theirs, strict=True):
            if not torch.allclose(our.double(), their.double(), digits, digits):
                differ.append((name, dtype, shape))
    return differ


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_collective_has_the_result_of_gloo(ranks):
    assert run_ranks(ranks, compare, ranks, False) == [[]] * ranks
    if ranks == 3:
        assert any(run_ranks(ranks, compare, ranks, True)), "the control"


def use(rank, ranks):
    import shm  # noqa: F401

    dist.init_process_group("shm")
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [*range(ranks)]
    x = torch.full((100_001,), float(rank))  # more than a box holds
    y, (left, right) = torch.empty_like(x), ((rank - 1) % ranks, (rank + 1) % ranks)
    ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (y == left).all()
    group, one = dist.new_group([0, 1]), torch.ones(1)
    if rank < 2:
        dist.all_reduce(one, group=group, async_op=True).wait()
    assert one == (2 if rank < 2 else 1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    ddp, gradients = nn.parallel.DistributedDataParallel(model), []
    for hook in (None, bf16_compress_hook):
        if hook:
            ddp.register_comm_hook(None, hook)
        with ddp.no_sync():
            ddp(torch.randn(4, 5)).sum().backward()
        ddp(torch.randn(4, 5)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        ddp.zero_grad()
    dist.destroy_process_group()
    return gradients


def test_objects_messages_subgroups_and_ddp_work():
    first, *others = run_ranks(3, use, 3)
    assert all(torch.equal(*pair) for other in others for pair in zip(other, first, strict=True))
    assert first[0].abs().sum() > 0


def train_over_it(rank, key, flags, forget):
    from shm.__main__ import join_over_shm
    from shm.exchange import Exchange

    if forget:
        patch.object(Exchange, "all_reduce", lambda self, tensor, op: iter(())).start()
    dist.init_process_group = join_over_shm
    return _train(rank, key, flags, torch.float32, ())[0]


@pytest.mark.parametrize("key", ["04", "05", "survive"])
def test_a_stage_trains_over_it_to_the_bits_of_gloo(key, tmp_path):
    flags = ("--model=net-bn", "--epochs=1", "--seed=7", "--device=cpu")
    places = (f"--data-dir={ROOT / 'data'}", f"--run-dir={tmp_path}")
    of_gloo = train_once(key, 2, *flags, dtype=torch.float32).states
    for forget in (False, True):
        states = run_ranks(2, train_over_it, key, (*flags, *places), forget)
        same = [torch.equal(x[n], y[n]) for x, y in zip(states, of_gloo, strict=True) for n in x]
        assert all(same) != forget, "with the control: nothing is added up"


def error_of(call):
    with pytest.raises((RuntimeError, TimeoutError, TypeError, ValueError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def open_memory(process="[0-9]*"):
    """The files of the backend that a process, or any of this machine, still has open."""
    found = set()
    for path in Path("/proc").glob(f"{process}/fd/*"):
        with suppress(OSError):
            found |= {path.stat().st_ino} if "memfd:shm" in os.readlink(path) else set()
    return found


def fail(rank, how):
    import shm  # noqa: F401

    limit = timedelta(seconds=1 if how == "late" else 60)
    if how == "two machines":
        with patch.object(Path, "read_text", lambda _: f"machine-{rank}"):
            return error_of(lambda: dist.init_process_group("shm")), set()
    dist.init_process_group("shm", timeout=limit)
    opened = open_memory("self")
    assert len(opened) == 1, "the control"
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    store, size = dist.distributed_c10d._get_default_store(), 3 + rank * (how == "another size")
    if rank == 1 and how == "late":
        store.wait(["error of rank 0"], timedelta(seconds=60))
        return "", opened
    error = error_of(lambda: dist.all_reduce(torch.zeros(size)))
    store.set(f"error of rank {rank}", error)
    return error, opened


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("killed", "RuntimeError: shm: rank 1 has ended while rank 0 waits for it"),
        ("late", "TimeoutError: shm: rank 1 is more than 0:00:01 late"),
        ("another size", "RuntimeError: shm: rank 1 has called another collective"),
        ("two machines", "RuntimeError: shm: ranks [1] cannot open the memory of rank 0"),
    ],
)
def test_what_goes_wrong_ends_in_a_line_that_names_the_rank(how, text):
    error, opened = run_ranks(2, fail, how, dying=(1,) if how == "killed" else ())[0]
    assert error.startswith(text)
    assert not opened & open_memory(), "it is left in the memory of the machine"
