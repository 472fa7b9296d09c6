"""Where the backend over shared memory cannot go on, it says why, and makes no wrong result.

A rank is killed, late, on another machine, or calls something else. Calls that are cut off:
test_shm_interruptions.py.
"""

import os
import signal
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shm  # noqa: F401 (the backend)
from shm.segment import identity_of_file, open_if_identical
from shm_cases import collect, needs_a_compiler, outcome_of, without_a_compiler
from shm_ranks import run_on_ranks

Op = dist.ReduceOp


def open_memory(process="[0-9]*"):
    """Return the files of the backend that a process, or any of this machine, still has open."""
    inodes = set()
    for path in Path("/proc").glob(f"{process}/fd/*"):
        with suppress(OSError):
            if "memfd:shm" in os.readlink(path):
                inodes.add(path.stat().st_ino)
    return inodes


def fail(rank, how):
    """Return the error of this rank, and the memory that it had open."""
    if how == "two machines":
        with patch.object(Path, "read_text", lambda _: f"machine-{rank}"):
            return outcome_of(dist.init_process_group, "shm"), set()
    dist.init_process_group("shm", timeout=timedelta(seconds=60))
    if how == "late":
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
    opened = open_memory("self")
    assert len(opened) == 1, "the control"
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1 and how == "late":
        store.wait(["error of rank 0"], timedelta(seconds=60))
    size = 4 if rank == 1 and how == "another size" else 3
    error = outcome_of(dist.all_reduce, torch.zeros(size))
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
    first, second = run_on_ranks(2, fail, how, may_die=(1,) if how == "killed" else ())
    error, opened = first
    assert error.startswith(FAILURES[how])
    assert not opened & open_memory(), "it is left in the memory of the machine"
    if how == "late":
        found = "RuntimeError: shm: rank 1 was late, as rank 0 has found, so rank 1 "
        assert second[0].startswith(found)


def fail_one_after_another(rank, first, how, in_c, call):
    """Let something happen to rank 2; the first rank finds it, and then the other one calls."""
    with nullcontext() if in_c else without_a_compiler():
        dist.init_process_group("shm", timeout=timedelta(seconds=60))
    if how == "late":
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
    store, wait = dist.distributed_c10d._get_default_store(), timedelta(seconds=60)
    if rank == 2 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2 and how == "interrupted":
        dist.group.WORLD.segment.give_up("KeyboardInterrupt has interrupted a call")
    if rank == 2:
        return store.wait(["end"], wait)
    if rank == first:
        error = outcome_of(dist.recv, torch.zeros(3), 2)
        store.set("found", "")
        store.wait(["end"], wait)
    else:
        store.wait(["found"], wait)
        error = outcome_of(call, torch.zeros(3))
        store.set("end", "")
    return error


def receive_from_rank_0(x):
    dist.recv(x, 0)


@pytest.mark.parametrize("in_c", [False, pytest.param(True, marks=needs_a_compiler)])
@pytest.mark.parametrize(
    ("how", "what"), [("killed", "ended"), ("late", "late"), ("interrupted", "failed")]
)
def test_the_rank_where_it_began_is_named_by_ranks_that_hear_of_it_from_another(how, what, in_c):
    may_die = (2,) if how == "killed" else ()
    for first, other in ((0, 1), (1, 0)):
        arguments = (first, how, in_c, dist.all_reduce)
        errors = run_on_ranks(3, fail_one_after_another, *arguments, may_die=may_die)
        line = f"RuntimeError: shm: rank 2 {'was' if how == 'late' else 'has'} {what}"
        line += f", as rank {first} has found" if (how, first) != ("interrupted", 1) else ""
        assert errors[other].startswith(line), errors


def test_a_message_that_cannot_come_names_the_rank_where_it_began():
    arguments = (0, "killed", True, receive_from_rank_0)
    error = run_on_ranks(3, fail_one_after_another, *arguments, may_die=(2,))[1]
    what = "rank 2 has ended, as rank 0 has found, so rank 1 cannot go on"
    assert error == f"RuntimeError: shm: {what}"


# Another file than the memory of rank 0


def test_a_rank_opens_the_memory_of_rank_0_and_no_other_file_of_that_number(tmp_path):
    document = tmp_path / "document"
    document.write_bytes(b"mine")
    files = {name: os.memfd_create(f"shm-{name}") for name in ("first", "second")}
    files["document"] = os.open(document, os.O_RDONLY)
    identities = {name: identity_of_file(file) for name, file in files.items()}
    assert len(set(identities.values())) == 3
    device, inode, name = identities["first"].split(" ", 2)
    wrong = [f"{device} {int(inode) + 1} {name}", f"{device} {inode} /memfd:shm-another"]
    opened = open_memory("self")
    path = f"/proc/{os.getpid()}/fd/{files['first']}"
    for identity in (identities["second"], identities["document"], *wrong):
        assert open_if_identical(path, identity) == -1
    assert open_memory("self") == opened
    again = open_if_identical(path, identities["first"])
    assert os.path.sameopenfile(again, files["first"]), "the control"
    os.write(again, b"writable")
    for file in (again, *files.values()):
        os.close(file)


# Calls that do not belong together


CALLS = {  # name, op and root for `collect`, by the call's text in an error
    "all_reduce(3 of torch.float32, SUM)": ("all_reduce", Op.SUM, 0),
    "all_reduce(3 of torch.float32, MAX)": ("all_reduce", Op.MAX, 0),
    "broadcast(3 of torch.float32, root 0)": ("broadcast", Op.SUM, 0),
    "broadcast(3 of torch.float32, root 1)": ("broadcast", Op.SUM, 1),
    "reduce(3 of torch.float32, root 0, SUM)": ("reduce", Op.SUM, 0),
    "gather(3 of torch.float32, root 0)": ("gather", Op.SUM, 0),
    "gather(3 of torch.float32, root 1)": ("gather", Op.SUM, 1),
    "scatter(3 of torch.float32, root 0)": ("scatter", Op.SUM, 0),
    "reduce_scatter(3 of torch.float32, SUM)": ("reduce_scatter", Op.SUM, 0),
    "all_to_all(torch.float32)": ("all_to_all", Op.SUM, 0),
    "all_gather(3 of torch.float32)": ("all_gather", Op.SUM, 0),
    "sparse all_reduce(3 of torch.float32)": None,
    "barrier()": None,
}


def call_as_paired(rank, pairs):
    """Each rank calls its own of a pair, in a group of their own; return the outcomes."""
    dist.init_process_group("gloo")
    errors = []
    for pair in pairs:
        group, x = dist.new_group(backend="shm"), torch.ones(3)
        name, op, root = CALLS[pair[rank]] or (None, None, None)
        if pair[rank] == "barrier()":
            errors.append(outcome_of(dist.barrier, group))
        elif name is None:
            errors.append(outcome_of(dist.all_reduce, x.to_sparse(), group=group))
        else:
            errors.append(outcome_of(collect, name, group, x, op, root, rank, 2))
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
            what = f"RuntimeError: shm: rank {1 - rank} has called {other}, but rank {rank} {own}"
            assert error == (what if own != other else "right"), pair
