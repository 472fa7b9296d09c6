"""What ranks say to each other: each collective of collectives.py.

And the ranks that stage 03 and its chapters start end with the program that has started them.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives import play
from helpers.machine import is_running
from helpers.on_ranks import gather_from_ranks, on_ranks
from helpers.outputs import output_of
from local_ranks.chapters import ROOT
from local_ranks.ranks import PROCESS_DEFAULTS, run_ranks
from local_ranks.scripts import fork_ranks
from local_ranks.train_stage import load_stage

LESSONS = collectives.LESSONS


def is_right(name: str, ranks: list[tuple[list[int], list[int]]]) -> bool:
    """Whether every rank holds the numbers that it should hold after the lesson."""
    before, after = zip(*ranks, strict=True)
    everything, n = [number for numbers in before for number in numbers], len(ranks)
    columns = [list(column) for column in zip(*before, strict=True)]
    expected = {
        "send_recv": [before[0], before[0], *before[2:]],
        "isend_irecv": [before[rank - 1] for rank in range(n)],
        "broadcast": [before[0]] * n,
        "reduce": [[sum(everything)], *after[1:]],  # the other ranks' numbers mean nothing
        "all_reduce": [[sum(everything)]] * n,
        "gather": [everything] + [[]] * (n - 1),
        "all_gather": [everything] * n,
        "barrier": list(before),
        "scatter": [[number] for number in before[0]],
        "reduce_scatter": [[sum(column)] for column in columns],
        "all_to_all": columns,
    }[name]
    return list(after) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_gives_what_plain_lists_give(world_size):
    output = output_of("collectives", f"--world-size={world_size}")
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()[2:]]
    assert [row[0] for row in rows[::2]] == list(LESSONS)
    for (name, _, *before), (_, *after) in zip(rows[::2], rows[1::2], strict=True):
        if world_size == 1:
            assert after == (["no other rank"] if "send" in name else before), name
            continue
        numbers = [[list(map(int, re.findall(r"\d+", x))) for x in row] for row in (before, after)]
        assert is_right(name, list(zip(*numbers, strict=True))), (name, after)


@on_ranks(3)
def test_no_rank_leaves_a_barrier_before_all_have_come(rank):
    """All processes of a machine have the same clock."""
    for wait, together in ((collectives.barrier, True), (lambda tensor: tensor, False)):
        dist.barrier()
        time.sleep(0.2 * rank)
        arrival = time.monotonic()
        wait(torch.zeros(1))
        arrivals, departures = zip(*gather_from_ranks((arrival, time.monotonic())), strict=True)
        assert (max(arrivals) <= min(departures)) == together


COLLECTIVE_CALLS = ("send", "recv", "batch_isend_irecv", "broadcast", "reduce", "all_reduce")
COLLECTIVE_CALLS += ("gather", "all_gather", "scatter", "reduce_scatter", "all_to_all_single")


@on_ranks(3)
def test_a_lesson_is_wrong_without_its_collective(rank):
    """The control: collectives that do nothing."""
    with patch.multiple(dist, **dict.fromkeys(COLLECTIVE_CALLS, lambda *args, **kwargs: [])):
        rows = [play(rank, name) for name in LESSONS if name != "barrier"]
    pairs = zip(LESSONS, zip(*gather_from_ranks(rows), strict=True), strict=False)
    assert [name for name, ranks in pairs if is_right(name, list(ranks))] == []


@on_ranks(2)
def test_ranks_that_disagree_go_on_with_wrong_numbers(rank):
    """gloo adds whatever meets: a of one rank and b of the other, or what lies in the gaps."""
    a, b = torch.tensor([10.0**rank]), torch.tensor([2 * 10.0**rank])
    for gradient in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(gradient)
    assert (a.item(), b.item()) == ((21, 12) if rank == 0 else (12, 21)), "expected 11 and 22"
    with_gaps = torch.full((3,), 10.0**rank)
    dist.all_reduce(with_gaps[::2])
    assert with_gaps.tolist() != [11, 10.0**rank, 11]
    without_gaps = torch.full((3,), 10.0**rank)[::2].contiguous()
    dist.all_reduce(without_gaps)
    assert without_gaps.tolist() == [11, 11], "the control"


ON_GPUS = [
    pytest.param("gloo", marks=pytest.mark.gpu),
    pytest.param("nccl", marks=pytest.mark.gpu(2)),
]


@pytest.mark.parametrize("backend", ON_GPUS)
def test_every_collective_works_on_gpus_and_two_gloo_ranks_share_one(backend):
    names = ["broadcast", "all_reduce"] if backend == "gloo" else list(LESSONS)
    for name in names:
        answers = run_ranks(2, collectives.play, name, backend=backend, device="cuda", seconds=60)
        assert is_right(name, answers), name


READY = "checkpoint.pt"


def hang(*_):
    dist.barrier()
    Path(READY).touch()
    time.sleep(999)


def be_a_program(folder: Path, main: Callable) -> None:
    """A process that starts ranks."""
    fork_ranks()
    os.chdir(folder)
    torch.set_num_threads(1)
    main()


RESTORES_SIGINT = "signal.signal(signal.SIGINT, signal.SIG_DFL)"


def train(changes=()) -> None:
    """Train as after `&` in a script: SIGINT is ignored, by the spawned processes as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    flags = ("--epochs=100000", "--device=cpu", f"--data-dir={ROOT / 'data'}", "--run-dir=.")
    sys.argv = ["train.py", *flags]
    load_stage("03", changes).main()


def train_without_sigint() -> None:
    train(changes=(("train.py", RESTORES_SIGINT),))


def start_ranks_of_a_chapter() -> None:
    run_ranks(2, hang)


def ranks_left(folder: Path, main: Callable, seconds: float) -> int:
    """How many of the two ranks still run so long after their program was killed."""
    program, ranks = (
        PROCESS_DEFAULTS.context().Process(target=be_a_program, args=(folder, main)),
        [],
    )
    (folder / READY).unlink(missing_ok=True)
    program.start()
    try:
        while not (folder / READY).exists():
            assert program.is_alive()
            time.sleep(0.1)
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        ranks = [pid for pid in children if is_running(pid)]
        assert len(ranks) == 2
        program.kill()
        end = time.monotonic() + seconds
        while (left := sum(map(is_running, ranks))) and time.monotonic() < end:
            time.sleep(0.1)
        return left
    finally:
        for pid in (program.pid, *map(int, ranks)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a process is not told of this")
def test_a_program_that_is_killed_takes_its_ranks_along(tmp_path):
    """PyTorch asks Linux to send each process SIGINT when the one that has spawned it ends."""
    assert ranks_left(tmp_path, start_ranks_of_a_chapter, 10) == 0
    assert ranks_left(tmp_path, train, 10) == 0
    assert ranks_left(tmp_path, train_without_sigint, 1) == 2, "the control"
