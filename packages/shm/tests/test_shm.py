"""The backend over shared memory computes what gloo computes; where it cannot, it says so.

Random collectives over both, and what it says when a rank is killed, late, or does something else.
Programs with special calls: test_shm_programs.py.
"""

import os
import random
import shutil
import signal
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import combinations, product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import shm  # noqa: F401 (the backend)
from helpers.local_ranks import gather_from_ranks, launch_script, on_ranks, run_on_ranks
from shm import fast
from shm.exchange import Exchange
from shm.group import SharedMemoryGroup
from shm.replace import replace_gloo
from shm.segment import Segment

Op = dist.ReduceOp
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES += [torch.uint8, torch.int8, torch.int32, torch.int64]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (600_000,)]  # the last one goes in pieces


def collect(number, group, x, op, root, rank, ranks):
    """Call the collective of that number; its name and what this rank has afterwards."""
    is_root, empty = rank == root, [torch.empty_like(x) for _ in range(ranks)]
    parts = [x + other for other in range(ranks)]
    call, arguments, result = [
        (dist.all_reduce, (x, op), [x]),
        (dist.broadcast, (x, root), [x]),
        (dist.reduce, (x, root, op), [x] if is_root else []),
        (dist.gather, (x, empty if is_root else None, root), empty if is_root else []),
        (dist.scatter, (empty[0], parts if is_root else None, root), empty[:1]),
        (dist.reduce_scatter, (empty[0], parts, op), empty[:1]),
        (dist.all_to_all, (empty, parts), empty),
        (dist.all_gather, (empty, x), empty),
    ][number]
    call(*arguments, group=group)
    return call.__name__, result


def collectives_that_differ(rank, ranks):
    """Of random ones over both backends."""
    gloo, over_shm = dist.group.WORLD, dist.new_group(backend="shm")
    draw, differ = random.Random(0), []
    for turn in range(40):
        dtype, shape, root = draw.choice(DTYPES), draw.choice(SHAPES), draw.randrange(ranks)
        op, number = draw.choice([Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]), draw.randrange(8)
        x = 3 * torch.rand(shape, generator=torch.Generator().manual_seed(turn + rank))
        x = x.to(dtype)
        if len(shape) == 2 and number < 2:
            x = x.t()  # not contiguous
        _, theirs = collect(number, gloo, x.clone(), op, root, rank, ranks)
        name, ours = collect(number, over_shm, x.clone(), op, root, rank, ranks)
        digits = ranks * torch.finfo(dtype).eps if dtype.is_floating_point else 1e-5
        for our, their in zip(ours, theirs, strict=True):
            if not torch.allclose(our.double(), their.double(), digits, digits):
                differ.append((name, dtype, shape))
    return differ


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@on_ranks()
def test_every_collective_has_the_result_of_gloo(rank, ranks):
    assert collectives_that_differ(rank, ranks) == []


def without_a_compiler():
    """Python does what fast.c does elsewhere."""
    return patch.object(fast, "library", lambda: None)


@on_ranks(3)
def test_every_collective_has_the_result_of_gloo_where_no_rank_or_only_one_has_a_compiler(rank):
    for ranks_without in ([0, 1, 2], [1]):
        with without_a_compiler() if rank in ranks_without else nullcontext():
            assert collectives_that_differ(rank, 3) == []


needs_a_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="fast.c needs a compiler")
BITS = [torch.float32, torch.float64, torch.int32, torch.int64]
LENGTHS = [0, 1, 7, 511, 513, 16_385, 65_537, 131_073, 600_001]  # around pieces, slices and blocks


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_the_sum_in_c_has_the_bits_of_the_sum_in_python(rank, ranks):
    in_c = dist.new_group(backend="shm")
    with without_a_compiler():
        in_python = dist.new_group(backend="shm")
    assert bool(in_c.exchange.in_c) == bool(shutil.which("cc"))
    assert in_python.exchange.in_c is None
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


def use_the_rest(rank, ranks):
    """Objects, messages, subgroups, and DDP; returns the gradients of DDP."""
    dist.init_process_group("shm")
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [*range(ranks)]

    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    sent = torch.full((100_001,), float(rank))  # more than a box holds
    received = torch.empty_like(sent)
    operations = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (received == left).all()

    segment = dist.group.WORLD.segment
    for _ in range(2):  # to ask whether a rank lives does not end it, be it another or itself
        assert all(segment.is_alive(each) for each in range(ranks))
        dist.barrier()

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
    first, *others = run_on_ranks(3, use_the_rest, 3)
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, first, strict=True))
    assert first[0].abs().sum() > 0


def error_of(call):
    with pytest.raises((RuntimeError, TimeoutError, TypeError, ValueError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def open_memory(process="[0-9]*"):
    """The files of the backend that a process, or any of this machine, still has open."""
    inodes = set()
    for path in Path("/proc").glob(f"{process}/fd/*"):
        with suppress(OSError):
            if "memfd:shm" in os.readlink(path):
                inodes.add(path.stat().st_ino)
    return inodes


def fail(rank, how):
    """The error of this rank, and the memory that it had open."""
    if how == "two machines":
        with patch.object(Path, "read_text", lambda _: f"machine-{rank}"):
            return error_of(lambda: dist.init_process_group("shm")), set()
    dist.init_process_group("shm", timeout=timedelta(seconds=1 if how == "late" else 60))
    opened = open_memory("self")
    assert len(opened) == 1, "the control"
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1 and how == "late":
        store.wait(["error of rank 0"], timedelta(seconds=60))
    size = 4 if rank == 1 and how == "another size" else 3
    error = error_of(lambda: dist.all_reduce(torch.zeros(size)))
    store.set(f"error of rank {rank}", error)
    return error, opened


FAILURES = {
    "killed": "RuntimeError: shm: rank 1 has ended while rank 0 waits for it",
    "late": "TimeoutError: shm: rank 1 is more than 0:00:01 late",
    "another size": "RuntimeError: shm: rank 1 has called all_reduce(4 of torch.float32, SUM), "
    "but rank 0 all_reduce(3 of torch.float32, SUM)",
    "two machines": "SharingError: shm: ranks [1] cannot open the memory of rank 0",
}


@pytest.mark.parametrize("how", FAILURES)
def test_what_goes_wrong_ends_in_a_line_that_names_the_rank(how):
    error, opened = run_on_ranks(2, fail, how, may_die=(1,) if how == "killed" else ())[0]
    assert error.startswith(FAILURES[how])
    assert not opened & open_memory(), "it is left in the memory of the machine"


def test_a_rank_later_than_the_limit_fails_as_the_others_did():
    assert run_on_ranks(2, fail, "late")[1][0].startswith("RuntimeError: shm: rank 0 has failed")


# A call that is cut off: what is left of it must not become part of the next one


def raise_at_once(error):
    raise error


def sums_around_an_interruption(rank, error, ranks_without_a_compiler=(0, 1)):
    """What this rank has after each of two sums of four pieces; rank 1 is cut off in the first."""
    with without_a_compiler() if rank in ranks_without_a_compiler else nullcontext():
        dist.init_process_group("shm", timeout=timedelta(seconds=20))
    pieces, arrive, results = dist.group.WORLD.segment.arrivals, Segment.arrive, []

    def arrive_until_it_comes(segment, call):
        is_time = error and rank == 1 and segment.arrivals == pieces + 2
        return raise_at_once(error) if is_time else arrive(segment, call)

    for value, place in ((1.0, arrive_until_it_comes), (10.0, arrive)):
        x = torch.full((2_000_000,), value * (rank + 1))
        try:
            with patch.object(Segment, "arrive", place):
                dist.all_reduce(x)
            results.append(x.unique().tolist())
        except (RuntimeError, TimeoutError, KeyboardInterrupt) as caught:
            results.append(f"{type(caught).__name__}: {caught}")
    return results


SUM = "all_reduce(2000000 of torch.float32, SUM)"
APART = "and rank {} in {}: an earlier call than this {} was interrupted"


@pytest.mark.parametrize("without", [(0, 1), (1,)], ids=["in Python", "the other rank in C"])
def test_ctrl_c_in_a_call_ends_the_group_instead_of_making_a_wrong_sum(without):
    first, second = run_on_ranks(2, sums_around_an_interruption, KeyboardInterrupt(), without)
    line = f"RuntimeError: shm: rank 1 has failed, so rank 0 cannot complete {SUM}"
    assert first == [line] * 2
    assert second == [
        "KeyboardInterrupt: ",
        "RuntimeError: shm: KeyboardInterrupt has interrupted a call",
    ]
    control = run_on_ranks(2, sums_around_an_interruption, None, without)
    assert control == [[[3.0], [30.0]]] * 2


@pytest.mark.parametrize("without", [(0, 1), (1,)], ids=["in Python", "the other rank in C"])
def test_an_error_in_a_call_that_the_program_catches_is_seen_at_the_next_call(without):
    """The handler of a signal raises one, for example."""
    error = TimeoutError("of a signal")
    first, second = run_on_ranks(2, sums_around_an_interruption, error, without)
    who, other = (
        "RuntimeError: shm: rank 1 is in transfer 2",
        "RuntimeError: shm: rank 0 is in transfer 1",
    )
    assert first == [f"{who}, {APART.format(0, 1, SUM)}"] * 2
    assert second == ["TimeoutError: of a signal", f"{other}, {APART.format(1, 2, SUM)}"]


def sum_that_is_cut_off_at_once(rank, in_c):
    """Rank 1 has not even begun to wait in earnest, and rank 0 has not yet called."""
    with nullcontext() if in_c else without_a_compiler():
        dist.init_process_group("shm", timeout=timedelta(seconds=20))
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(1000)
    if rank == 0:
        store.wait(["rank 1 was interrupted"], timedelta(seconds=20))
        return error_of(lambda: dist.all_reduce(x))
    place = (dist.group.WORLD.exchange, "all_reduce_in_c") if in_c else (os, "sched_yield")
    cut_off = patch.object(*place, lambda *_: raise_at_once(KeyboardInterrupt()))
    with cut_off, pytest.raises(KeyboardInterrupt):
        dist.all_reduce(x)
    store.set("rank 1 was interrupted", "")
    return error_of(lambda: dist.all_reduce(x))


@pytest.mark.parametrize("in_c", [False, pytest.param(True, marks=needs_a_compiler)])
def test_ctrl_c_in_a_call_that_has_no_queue_yet_ends_the_group(in_c):
    assert run_on_ranks(2, sum_that_is_cut_off_at_once, in_c) == [
        "RuntimeError: shm: rank 1 has failed, so rank 0 cannot complete "
        "all_reduce(1000 of torch.float32, SUM)",
        "RuntimeError: shm: KeyboardInterrupt has interrupted a call",
    ]


def sum_in_which_a_rank_dies(rank):
    """Rank 1 is killed after three of four pieces, and rank 0 waits in C for the next one."""
    with without_a_compiler() if rank == 1 else nullcontext():
        dist.init_process_group("shm", timeout=timedelta(seconds=60))
    pieces, arrive = dist.group.WORLD.segment.arrivals, Segment.arrive

    def arrive_or_die(segment, call):
        if rank == 1 and segment.arrivals == pieces + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return arrive(segment, call)

    with patch.object(Segment, "arrive", arrive_or_die):
        return error_of(lambda: dist.all_reduce(torch.ones(2_000_000)))


def test_a_rank_that_is_killed_in_the_middle_of_a_sum_is_named():
    error = run_on_ranks(2, sum_in_which_a_rank_dies, may_die=(1,))[0]
    assert error == "RuntimeError: shm: rank 1 has ended while rank 0 waits for it"


def messages_around_an_interruption(rank):
    """Rank 1 is cut off in the first of two messages of two pieces: what rank 0 receives."""
    dist.init_process_group("shm", timeout=timedelta(seconds=20))
    x = torch.full((100_000,), 7.0)
    if rank == 0:
        return error_of(lambda: dist.recv(x, 1))
    post = Segment.post

    def post_first_piece(segment, place, value, *bell):
        return post(segment, place, value, *bell) if value == 1 else raise_at_once(TimeoutError())

    with patch.object(Segment, "post", post_first_piece), pytest.raises(TimeoutError):
        dist.send(x, 0)
    dist.group.WORLD.messages.counted.update({2: 1})  # as if the piece had not been counted
    with suppress(RuntimeError):  # rank 0 has ended
        dist.send(2 * x, 0)


def test_a_message_that_was_cut_off_is_not_completed_with_the_next_one():
    error, _ = run_on_ranks(2, messages_around_an_interruption)
    what = "sends a message from byte 0 on, not from 262144: one of the two was interrupted"
    assert error == f"RuntimeError: shm: rank 1 {what}"


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
    """Those that a rank keeps to, on a machine with so many cores."""
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


ANOTHER_MACHINE_FOR_EACH_RANK = """
import os, pathlib, runpy
pathlib.Path.read_text = lambda _: "machine-" + os.environ["RANK"]
runpy.run_module("shm", run_name="__main__")
"""


def test_dash_m_shm_on_two_machines_ends_in_one_line(tmp_path):
    (tmp_path / "start.py").write_text(ANOTHER_MACHINE_FOR_EACH_RANK)
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    what = "ranks [1] cannot open the memory of rank 0, expected one machine and one user: try gloo"
    for status, output in launch_script(str(tmp_path / "start.py"), str(script)):
        assert (status, output) == (2, f"error: shm: {what}\n")


CALLS = {  # by their text in an error: number, op and root for `collect`
    "all_reduce(3 of torch.float32, SUM)": (0, Op.SUM, 0),
    "all_reduce(3 of torch.float32, MAX)": (0, Op.MAX, 0),
    "broadcast(3 of torch.float32, root 0)": (1, Op.SUM, 0),
    "broadcast(3 of torch.float32, root 1)": (1, Op.SUM, 1),
    "reduce(3 of torch.float32, root 0, SUM)": (2, Op.SUM, 0),
    "gather(3 of torch.float32, root 0)": (3, Op.SUM, 0),
    "gather(3 of torch.float32, root 1)": (3, Op.SUM, 1),
    "scatter(3 of torch.float32, root 0)": (4, Op.SUM, 0),
    "reduce_scatter(3 of torch.float32, SUM)": (5, Op.SUM, 0),
    "all_to_all(torch.float32)": (6, Op.SUM, 0),
    "all_gather(3 of torch.float32)": (7, Op.SUM, 0),
    "sparse all_reduce(3 of torch.float32)": None,
    "barrier()": None,
}


def call_as_paired(rank, pairs):
    """Each rank calls its own of a pair, in a group of their own: the errors, "" for none."""
    dist.init_process_group("gloo")
    errors = []
    for pair in pairs:
        group, x = dist.new_group(backend="shm"), torch.ones(3)
        number, op, root = CALLS[pair[rank]] or (None, None, None)
        try:
            if pair[rank] == "barrier()":
                dist.barrier(group)
            elif number is None:
                dist.all_reduce(x.to_sparse(), group=group)
            else:
                collect(number, group, x, op, root, rank, 2)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
        dist.barrier()  # a group that has ended is another error
        dist.destroy_process_group(group)
    return errors


def test_ranks_that_call_different_collectives_are_told_both():
    """The control: two ranks that call the same."""
    pairs = [*combinations(CALLS, 2), *((text, text) for text in CALLS)]
    errors = run_on_ranks(2, call_as_paired, pairs)
    for pair, *errors_of_pair in zip(pairs, *errors, strict=True):
        for rank, error in enumerate(errors_of_pair):
            own, other = pair[rank], pair[1 - rank]
            what = f"shm: rank {1 - rank} has called {other}, but rank {rank} {own}"
            assert error == (what if own != other else ""), pair
