"""The backend over shared memory computes what gloo computes, in random collectives over both.

Programs with special calls: test_shm_programs.py. What it says when a rank is killed, late, or does
something else: test_shm_failures.py.
"""

import os
import random
import shutil
from contextlib import nullcontext, redirect_stderr
from datetime import timedelta
from io import StringIO
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shm  # noqa: F401 (the backend)
from shm import fast
from shm.exchange import Exchange
from shm.group import SharedMemoryGroup
from shm.replace import replace_gloo
from shm.tensors import flat, put_back
from shm_cases import COLLECTIVES, collect, without_a_compiler
from shm_ranks import (
    gather_from_ranks,
    on_ranks,
    run_on_ranks,
)

Op = dist.ReduceOp
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES += [torch.uint8, torch.int8, torch.int32, torch.int64]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (600_000,)]  # the last one goes in pieces


def collectives_that_differ(rank, ranks):
    """Call random collectives over both backends; return those whose results differ."""
    gloo, over_shm = dist.group.WORLD, dist.new_group(backend="shm")
    draw, differ = random.Random(0), []
    for turn in range(40):
        dtype, shape, root = draw.choice(DTYPES), draw.choice(SHAPES), draw.randrange(ranks)
        op, name = draw.choice([Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]), draw.choice(COLLECTIVES)
        x = 3 * torch.rand(shape, generator=torch.Generator().manual_seed(turn + rank))
        x = x.to(dtype)
        if len(shape) == 2 and name in ("all_reduce", "broadcast"):
            x = x.t()  # not contiguous
        try:
            theirs = collect(name, gloo, x.clone(), op, root, rank, ranks)
        except RuntimeError as error:
            if str(error) == "Backend gloo does not support alltoall":  # torch 2.11 says so
                continue
            raise
        ours = collect(name, over_shm, x.clone(), op, root, rank, ranks)
        digits = ranks * torch.finfo(dtype).eps if dtype.is_floating_point else 1e-5
        for our, their in zip(ours, theirs, strict=True):
            if not torch.allclose(our.double(), their.double(), digits, digits):
                differ.append((name, dtype, shape))
    return differ


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@on_ranks()
def test_every_collective_has_the_result_of_gloo(rank, ranks):
    assert collectives_that_differ(rank, ranks) == []


@on_ranks(3)
def test_every_collective_has_the_result_of_gloo_where_no_rank_or_only_one_has_a_compiler(rank):
    for ranks_without in ([0, 1, 2], [1]):
        with without_a_compiler() if rank in ranks_without else nullcontext():
            assert collectives_that_differ(rank, 3) == []


BITS = [torch.float32, torch.float64, torch.int32, torch.int64]
LENGTHS = [0, 1, 7, 511, 513, 16_385, 65_537, 131_073, 600_001]  # around pieces, slices and blocks


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_the_sum_in_c_has_the_bits_of_the_sum_in_python(rank, ranks):
    in_c = dist.new_group(backend="shm")
    with without_a_compiler():
        in_python = dist.new_group(backend="shm")
    assert bool(in_c.exchange.c_state) == bool(shutil.which("cc"))
    assert in_python.exchange.c_state is None
    for dtype, length in product(BITS, LENGTHS):
        torch.manual_seed(rank)
        x = (1e6 * torch.randn(length + 1, dtype=torch.float64)).to(dtype)
        for own in (x[1:], x.repeat(3)[1::3]):  # one begins at an odd address, one has gaps
            ours, theirs = own.clone(), own.clone()
            for _ in range(2):  # both slots
                dist.all_reduce(ours, group=in_c)
                dist.all_reduce(theirs, group=in_python)
            assert torch.equal(ours, theirs), (dtype, length)
        sums = [x.clone(), x.clone()]
        dist.reduce(sums[0], 1, group=in_c)
        dist.reduce(sums[1], 1, group=in_python)
        assert torch.equal(*sums), (dtype, length)
        assert torch.equal(sums[0], x) == (rank != 1 or not x.any())


@pytest.mark.parametrize("size", [0, 1, 1025, 4097, 2**18, 2**18 + 1, 2**20 + 3])
def test_put_writes_every_byte_and_no_other(size):
    """Small, middle-sized and large messages go different ways through or around the cache."""
    source = torch.randint(1, 256, (size,), dtype=torch.uint8)
    for begin in (0, 1, 16):
        target = torch.zeros(begin + size + 64, dtype=torch.uint8)
        fast.put(target[begin : begin + size], source)
        assert torch.equal(target[begin : begin + size], source)
        assert target.count_nonzero() == size


# Tensors that are not plain memory


@on_ranks(3)
def test_a_view_that_is_only_marked_as_negative_arrives_with_its_sign(rank):
    """Such as the imaginary part of a conjugate. The memory holds the other sign."""
    group, names = dist.new_group(backend="shm"), ["all_reduce", "broadcast", "reduce", "gather"]
    for name, op in product([*names, "all_gather"], [Op.SUM, Op.MAX]):
        for mode in (False, True):
            with torch.inference_mode(mode):
                x = torch.complex(torch.zeros(3), torch.full((3,), rank + 1.0)).conj().imag
                contiguous = torch._neg_view(torch.full((3,), rank + 1.0))  # goes to C
                for view in (x, contiguous):
                    assert view.is_neg()
                    mixed = view if rank == 1 else view.resolve_neg().clone()
                    ours = collect(name, group, mixed, op, 1, rank, 3)
                    plain = torch.full((3,), -rank - 1.0)
                    theirs = collect(name, group, plain, op, 1, rank, 3)
                    assert all(map(torch.equal, ours, theirs)), (name, op, mode)


def test_a_conjugate_is_read_and_written_as_its_values():
    """torch itself refuses one in most collectives."""
    for mode in (False, True):
        with torch.inference_mode(mode):
            x = torch.complex(torch.ones(4), torch.arange(4.0)).conj()
            values = flat(x)
            assert x.is_conj()
            assert not values.is_conj()
            assert torch.equal(torch.view_as_real(values)[:, 1], -torch.arange(4.0))
            put_back(x, values + 1j)
            assert torch.equal(x.imag, 1 - torch.arange(4.0))


@on_ranks(2)
def test_a_gathered_tensor_may_lie_where_an_output_is_written(rank):
    group = dist.new_group(backend="shm")
    for length, shift in product([3, 700_000], [-1, 0, 1]):  # the second one goes in pieces
        for slot in range(2):
            memory = torch.zeros(2 * length + 2)
            outputs = list(memory[1:-1].split(length))
            x = memory[1 + slot * length + shift :][:length]
            sent = torch.arange(length, dtype=torch.float32) + 1e6 * (rank + 1)
            x.copy_(sent)
            everyone = [sent + 1e6 * (other - rank) for other in range(2)]
            dist.all_gather(outputs, x, group=group)
            assert all(map(torch.equal, outputs, everyone)), (length, shift, slot)


@on_ranks(3)
def test_a_nan_is_the_maximum_and_the_minimum_whichever_rank_has_it(rank):
    """gloo's depends on the rank."""
    group = dist.new_group(backend="shm")
    for op, owner in product([Op.MAX, Op.MIN], range(3)):
        x = torch.tensor([float("nan") if rank == owner else float(rank), float(rank)])
        dist.all_reduce(x, op, group)
        assert x[0].isnan()
        assert x[1] == (2 if op == Op.MAX else 0), "the control"


@on_ranks(3)
def test_without_the_sum_collectives_differ_from_gloo(rank):
    """The control: another rank's part is not added."""
    with patch.object(Exchange, "combine_rows", lambda self, rows, op: rows[self.rank].clone()):
        assert any(gather_from_ranks(collectives_that_differ(rank, 3)))


@on_ranks(3)
def test_one_store_serves_groups_of_different_ranks_one_after_another(rank):
    """A key of the group before would lead a rank to that group's memory."""
    store = dist.PrefixStore("used again", dist.distributed_c10d._get_default_store())
    for members in ([0, 1], [0, 1, 2], [1, 2], [0, 1]):
        one = torch.ones(1)
        if rank in members:
            limit = timedelta(seconds=60)
            group = SharedMemoryGroup(store, members.index(rank), len(members), limit)
            group.allreduce([one]).wait()
            group.shutdown()
        assert one == (len(members) if rank in members else 1)
        dist.barrier()  # two groups at once would need two stores


@on_ranks(3, "shm")
def test_objects_messages_and_subgroups_work(rank):
    objects = [None] * 3
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [0, 1, 2]

    left, right = (rank - 1) % 3, (rank + 1) % 3
    sent = torch.full((100_001,), float(rank))  # more than a box holds
    received = torch.empty_like(sent)
    operations = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (received == left).all()

    segment = dist.group.WORLD.segment
    for _ in range(2):  # asking whether a rank lives ends neither another rank nor this one
        assert all(segment.is_alive(each) for each in range(3))
        dist.barrier()

    group, one = dist.new_group([0, 1]), torch.ones(1)
    if rank < 2:
        dist.all_reduce(one, group=group, async_op=True).wait()
    assert one == (2 if rank < 2 else 1)


# -m shm


def ask_for_gloo(rank):
    replace_gloo()
    with pytest.raises(SystemExit) as end:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    dist.init_process_group("cpu:gloo")
    subgroups, _ = dist.new_subgroups(1, backend="gloo")
    groups = [dist.group.WORLD, dist.new_group(backend="gloo"), dist.new_group(), subgroups]
    return end.value.code, [dist.get_backend(group) for group in groups]


def test_dash_m_shm_replaces_gloo_however_the_program_asks_for_it_or_ends():
    assert run_on_ranks(2, ask_for_gloo) == [(2, ["shm"] * 4)] * 2


def cores_of_rank(rank, cores_there, cores_allowed):
    """Return the cores that a rank keeps to, on a machine with so many."""
    chosen = []
    with (
        patch.object(os, "cpu_count", lambda: cores_there),
        patch.object(os, "sched_getaffinity", lambda _: set(range(cores_allowed))),
        patch.object(os, "sched_setaffinity", lambda _, cores: chosen.extend(cores)),
    ):
        replace_gloo(pins=True)
        dist.init_process_group("gloo")
    return chosen


def test_dash_m_shm_gives_each_rank_cores_of_its_own_where_nobody_has_chosen_some():
    assert run_on_ranks(2, cores_of_rank, 5, 5) == [[0, 1], [2, 3]]
    assert run_on_ranks(2, cores_of_rank, 1, 1) == [[], []], "not enough"
    assert run_on_ranks(2, cores_of_rank, 8, 4) == [[], []], "somebody has chosen"


def ask_for_gloo_on_a_machine_of_its_own(rank):
    replace_gloo()
    another_machine = patch.object(Path, "read_text", lambda _: f"machine-{rank}")
    with another_machine, redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as end:
        dist.init_process_group("gloo")
    return end.value.code, said.getvalue()


def test_dash_m_shm_on_two_machines_ends_in_one_line():
    what = "ranks [1] cannot open the memory of rank 0, expected one machine, container and user"
    line = f"error: shm: {what}: try gloo\n"
    assert run_on_ranks(2, ask_for_gloo_on_a_machine_of_its_own) == [(2, line)] * 2
