"""What ranks say to each other: collectives.py and the table of matrix.py.

The README shows what traps.py prints; test_readmes.py runs it and compares.
"""

import importlib
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import ROOT, Line, chapter, context, load_stage, run_ranks, scratch_folder

GPUS = torch.cuda.device_count()
# The chapters run in this process: with the forkserver of the tests, and what support.py preloads.
multiprocessing.forkserver.set_forkserver_preload = lambda modules: None


def on_ranks(ranks: int) -> Callable:
    """The test runs on so many ranks, in one start with all such tests of its file: few seconds.

    In its folder, which the ranks share. If one of these tests fails, the others fail with it.
    """

    def share(test: Callable[[int], None]) -> Callable[[], None]:
        def check() -> None:
            if said := failure(test.__module__, ranks):
                pytest.fail(said, pytrace=False)

        check.ranks, check.body = ranks, test
        return check

    return share


@cache
def failure(module: str, ranks: int) -> str:
    try:
        run_ranks(ranks, _run_tests, module, ranks, scratch_folder())
    except (AssertionError, TimeoutError) as error:
        return str(error)
    return ""


def _run_tests(rank, module, ranks, folder):
    os.chdir(folder)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for test in vars(importlib.import_module(module)).values():
        if getattr(test, "ranks", 0) == ranks:
            test.body(rank)


def of_all_ranks(mine: Any) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


@contextmanager
def in_time(seconds: int = 120):
    """What waits for ranks that never come ends here."""

    def late(*_):
        raise TimeoutError(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def output_of(key: str, name: str, *flags: str) -> str:
    """What a chapter prints. Its ranks come from the forkserver of the tests: seconds faster."""
    argv = patch.object(sys, "argv", [name, *flags])
    with in_time(), argv, redirect_stdout(StringIO()) as output:
        chapter(key, name).main()
    return output.getvalue()


def lists(name: str, n: int) -> list[list[int]]:
    """What each of n ranks should hold afterwards, by plain lists."""
    ones = [10**rank for rank in range(n)]
    rows = [[(place + 1) * one for place in range(n)] for one in ones]
    total = sum(ones)
    return {
        "send_recv": [[1], [1], *([one] for one in ones[2:])] if n > 1 else [[]],
        "isend_irecv": [[one] for one in ones[-1:] + ones[:-1]] if n > 1 else [[]],
        "broadcast": [[1]] * n,
        "reduce": [[total]],  # of rank 0; the others hold nothing that means anything
        "all_reduce": [[total]] * n,
        "gather": [ones] + [[]] * (n - 1),
        "all_gather": [ones] * n,
        "scatter": [[place + 1] for place in range(n)],
        "reduce_scatter": [[(place + 1) * total] for place in range(n)],
        "all_to_all": [[row[place] for row in rows] for place in range(n)],
        "barrier": [[one] for one in ones],
    }[name]


def right(name: str, ranks: list[list[int]]) -> bool:
    expected = lists(name, len(ranks))
    return ranks[: len(expected)] == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_gives_what_plain_lists_give(world_size):
    output = output_of("03", "collectives", f"--world-size={world_size}")
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()[2:]]
    assert [row[0] for row in rows[::2]] == list(chapter("03", "collectives").LESSONS)
    assert len(rows) == 2 * 11
    for (name, *_), after in zip(rows[::2], rows[1::2], strict=True):
        cells = [re.findall(r"\d+", cell) for cell in after[1:]]
        assert right(name, [list(map(int, cell)) for cell in cells]), (name, after)
        assert ("no other rank" in after) == (world_size == 1 and "send" in name)


CALLS = ("send", "recv", "batch_isend_irecv", "broadcast", "reduce", "all_reduce", "gather")
CALLS += ("all_gather_into_tensor", "scatter", "reduce_scatter_tensor", "all_to_all_single")


@on_ranks(3)
def test_without_its_call_no_lesson_gives_that(rank):
    """The control."""
    lessons = chapter("03", "collectives")
    names = [name for name in lessons.LESSONS if name != "barrier"]
    with patch.multiple(dist, **dict.fromkeys(CALLS, lambda *args, **kwargs: [])):
        after = [lessons.before_and_after(name)[1] for name in names]
    pairs = zip(names, zip(*of_all_ranks(after), strict=True), strict=True)
    assert [name for name, ranks in pairs if right(name, list(ranks))] == []


@on_ranks(3)
def test_reduce_scatter_and_all_gather_are_an_all_reduce(rank):
    lessons, row = chapter("03", "collectives"), (rank + 1) * torch.arange(1, 4)
    assert lessons.all_gather(lessons.reduce_scatter(row)).tolist() == [6, 12, 18]
    assert lessons.all_reduce(row.clone()).tolist() == [6, 12, 18]


@on_ranks(3)
def test_only_with_a_barrier_nobody_goes_on_before_all_have_come(rank):
    for meet in (chapter("03", "collectives").barrier, torch.clone):
        dist.barrier()
        time.sleep(0.3 * rank)
        came = time.monotonic()
        meet(torch.tensor([0]))
        came, left = zip(*of_all_ranks((came, time.monotonic())), strict=True)
        assert (max(came) <= min(left)) == (meet is not torch.clone)


def test_ranks_start_and_introduce_themselves():
    ranks = chapter("03", "ranks")
    said = [f"rank {rank} of 3; all ranks add up to 3" for rank in range(3)]
    assert ranks.start(3, ranks.introduce, seconds=60) == said


def test_the_matrix_agrees_with_probes_of_its_own():
    table, _, reasons = output_of("03", "collectives", "--matrix").partition("\n\n")
    header, _, *lines = (re.split(r" {2,}", line) for line in table.splitlines())
    assert header[1:] == [f"{b} {d}" for b in ("gloo", "nccl", "mpi") for d in ("cpu", "cuda")]
    cells = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in lines}
    assert len(cells) == 11
    for cell in cells.values():
        assert cell["gloo cpu"] == "yes"  # as the lists above say, and the control denies
        assert GPUS > 0 or cell["gloo cuda"] == "no device"
        assert GPUS > 1 or cell["nccl cuda"] == "no device"
        assert dist.is_mpi_available() or cell["mpi cpu"] == cell["mpi cuda"] == "not built"
    assert f"torch {torch.__version__}, GPUs: {GPUS}\n" in reasons
    few = f"nccl cuda: no device: all: GPUs needed for 2 ranks: 2, seen by torch: {GPUS}\n"
    assert GPUS > 1 or (few in reasons and "nccl cpu: no: " in reasons), "every no tells why"


def _hang(*_):
    dist.barrier()
    Path(READY).touch()
    time.sleep(999)


def _fail(*_):
    raise RuntimeError("of the test")


def _crash(*_):
    os.abort()


def _lie(*_):
    return [([1], [2], 0.0, 0.0)]


def test_a_probe_that_hangs_crashes_or_lies_says_no(tmp_path, monkeypatch):
    matrix = chapter("03", "matrix")
    monkeypatch.chdir(tmp_path)
    for play, seconds, reason in (
        (_hang, 1, "not done after 1 s"),
        (_fail, 60, "RuntimeError: of the test"),
        (_crash, 60, "SIGABRT"),
        (_lie, 60, "wrong numbers: [[[1], [2]"),
    ):
        monkeypatch.setattr(matrix, "play_all", play)
        cell, why = matrix.probe("gloo", "cpu", "broadcast", seconds)
        assert (cell, reason in why) == ("no", True), why


@pytest.mark.parametrize(("backend", "gpus"), [("gloo", 1), ("nccl", 2)])
def test_every_collective_works_on_gpus_and_two_gloo_ranks_share_one(backend, gpus):
    if gpus > GPUS:
        pytest.skip(f"needs GPUs: {gpus}")
    names = (
        ("broadcast", "all_reduce") if backend == "gloo" else chapter("03", "collectives").LESSONS
    )
    for name in names:
        assert chapter("03", "matrix").probe(backend, "cuda", name, 60) == ("yes", ""), name


READY, START = "checkpoint.pt", mp.start_processes


def _parent(folder: Path, main: Callable, without: tuple[Line, ...]) -> None:
    """A process whose ranks are forked: there in a moment."""

    def fork(*args, start_method: str, **more):
        return START(*args, start_method="fork", **more)

    os.chdir(folder)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        for place in (mp, sys.modules["torch.multiprocessing.spawn"]):
            stack.enter_context(patch.object(place, "start_processes", fork))
        main(without)


def _train(without):
    """In the background of a script, after `&`, SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    flags = ("--epochs=100000", "--device=cpu", f"--data-dir={ROOT / 'data'}", "--run-dir=.")
    sys.argv = ["train.py", *flags]
    load_stage("03", without).main()


def _probe(without):
    chapter("03", "ranks").start(2, _hang)


def ranks_left(folder: Path, main: Callable, seconds: float, *without: Line) -> int:
    """How many ranks are still there, so long after their parent was killed."""

    def ps(*what: str) -> list[str]:
        ended = subprocess.run(["ps", "-o", *what], capture_output=True, text=True)
        return [word for word in ended.stdout.split() if word[0] != "Z"]

    parent, ranks = context.Process(target=_parent, args=(folder, main, without)), []
    (folder / READY).unlink(missing_ok=True)
    parent.start()
    try:
        while not (folder / READY).exists():
            assert parent.is_alive()
            time.sleep(0.1)
        ranks = ps("pid=", "--ppid", str(parent.pid))
        assert len(ranks) == 2
        parent.kill()
        end = time.monotonic() + seconds
        while (left := ps("stat=", "-p", ",".join(ranks))) and time.monotonic() < end:
            time.sleep(0.1)
        return len(left)
    finally:
        for pid in (parent.pid, *map(int, ranks)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a process is not told of this")
def test_a_program_that_is_killed_takes_its_ranks_along_also_from_the_background(tmp_path):
    assert ranks_left(tmp_path, _probe, 10) == 0
    assert ranks_left(tmp_path, _train, 10) == 0
    line = "signal.signal(signal.SIGINT, signal.SIG_DFL)"
    assert ranks_left(tmp_path, _train, 1, ("train.py", line)) == 2, "the control"
