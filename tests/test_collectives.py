"""What ranks say to each other: each collective of collectives.py, and its table of backends."""

import importlib
import multiprocessing.forkserver
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support import ROOT, Line, chapter, context, forked, load_stage, run_ranks, scratch_folder

GPUS = torch.cuda.device_count()
collectives = chapter("03", "collectives")
LESSONS = collectives.LESSONS
# The chapters run in this process: with the forkserver of the tests, and what support.py preloads.
multiprocessing.forkserver.set_forkserver_preload = lambda modules: None


def on_ranks(ranks: int) -> Callable:
    """One start of ranks for all such tests of a file; if one of them fails, the others do, too."""

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


def of_all_ranks(mine) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


@contextmanager
def in_time(seconds: int = 120):
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_gives_what_plain_lists_give(world_size):
    """In the matrix, too; there, a barrier is wrong if a rank leaves before all have come."""
    output = output_of("03", "collectives", f"--world-size={world_size}")
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()[2:]]
    assert [row[0] for row in rows[::2]] == list(LESSONS)
    for (name, _, *before), (_, *after) in zip(rows[::2], rows[1::2], strict=True):
        if world_size == 1:
            assert after == (["no other rank"] if "send" in name else before), name
            continue
        held = [[list(map(int, re.findall(r"\d+", x))) for x in row] for row in (before, after)]
        for left in (0.5, 3):
            ranks = [(*both, came, left) for came, both in enumerate(zip(*held, strict=True))]
            assert collectives.is_right(name, ranks) == (name != "barrier" or left == 3), (
                name,
                after,
            )


CALLS = ("send", "recv", "batch_isend_irecv", "broadcast", "reduce", "all_reduce", "gather")
CALLS += ("all_gather_into_tensor", "scatter", "reduce_scatter_tensor", "all_to_all_single")


@on_ranks(3)
def test_without_its_call_no_lesson_gives_that(rank):
    """The control."""
    with patch.multiple(dist, **dict.fromkeys(CALLS, lambda *args, **kwargs: [])):
        play = chapter("03", "collectives").before_and_after
        rows = [(*play(name), 0, 1) for name in LESSONS if name != "barrier"]
    pairs = zip(LESSONS, zip(*of_all_ranks(rows), strict=True), strict=False)
    assert [name for name, ranks in pairs if collectives.is_right(name, ranks)] == []


def test_ranks_start_and_introduce_themselves():
    ranks = chapter("03", "ranks")
    said = [f"rank {rank} of 3; all ranks add up to 3" for rank in range(3)]
    assert ranks.start(3, ranks.introduce, seconds=60) == said


def test_the_matrix_agrees_with_probes_of_its_own(monkeypatch):
    monkeypatch.setattr(collectives, "LESSONS", ["all_to_all", "barrier"])
    table, _, reasons = output_of("03", "collectives", "--matrix").partition("\n\n")
    header, _, *lines = (re.split(r" {2,}", line) for line in table.splitlines())
    assert header[1:] == [f"{b} {d}" for b in ("gloo", "nccl", "mpi") for d in ("cpu", "cuda")]
    assert [name for name, *_ in lines] == collectives.LESSONS
    for _, *row in lines:
        gloo, gloo_gpu, _, nccl_gpu, *mpi = row
        assert gloo == "yes"
        assert GPUS > 0 or gloo_gpu == "no device"
        assert GPUS > 1 or nccl_gpu == "no device"
        assert dist.is_mpi_available() or mpi == ["not built"] * 2
    few = f"nccl cuda: no device: all: GPUs needed for 2 ranks: 2, seen by torch: {GPUS}\n"
    assert GPUS > 1 or (few in reasons and "nccl cpu: no: " in reasons), "every no tells why"


def _hang(*_):
    dist.barrier()
    Path(READY).touch()
    time.sleep(999)


def _crash(*_):
    os.abort()


def _lie(*_):
    return [([1], [2], 0.0, 0.0)]


PLAYS = {_hang: "not done after 1 s", int: "TypeError: int() argument", _crash: "SIGABRT"}
PLAYS[_lie] = "wrong numbers: [[[1], [2]"


def test_a_probe_that_hangs_crashes_or_lies_says_no(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for play, reason in PLAYS.items():
        monkeypatch.setattr(collectives, "play_all", play)
        cell, why = collectives.probe("gloo", "cpu", "broadcast", 1 if play is _hang else 60)
        assert (cell, reason in why) == ("no", True), why


@pytest.mark.parametrize(("backend", "gpus"), [("gloo", 1), ("nccl", 2)])
def test_every_collective_works_on_gpus_and_two_gloo_ranks_share_one(backend, gpus):
    if gpus > GPUS:
        pytest.skip(f"needs GPUs: {gpus}")
    for name in ("broadcast", "all_reduce") if backend == "gloo" else LESSONS:
        assert collectives.probe(backend, "cuda", name, 60) == ("yes", ""), name


READY, START = "checkpoint.pt", mp.start_processes


def _parent(folder: Path, main: Callable, without: tuple[Line, ...]) -> None:
    for place in (mp, sys.modules["torch.multiprocessing.spawn"]):
        place.start_processes = forked(START)
    os.chdir(folder)
    torch.set_num_threads(1)
    main(without)


def _train(without):
    flags = ("--epochs=100000", "--device=cpu", f"--data-dir={ROOT / 'data'}", "--run-dir=.")
    sys.argv = ["train.py", *flags]
    load_stage("03", without).main()


def _train_in_background(without):
    """After `&` in a script, SIGINT is ignored, by the processes that are spawned as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _train(without)


def _probe(without):
    chapter("03", "ranks").start(2, _hang)


def runs(pid: int | str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def ranks_left(folder: Path, main: Callable, seconds: float, *without: Line) -> int:
    parent, ranks = context.Process(target=_parent, args=(folder, main, without)), []
    (folder / READY).unlink(missing_ok=True)
    parent.start()
    try:
        while not (folder / READY).exists():
            assert parent.is_alive()
            time.sleep(0.1)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        ranks = [pid for pid in children if runs(pid)]
        assert len(ranks) == 2
        parent.kill()
        end = time.monotonic() + seconds
        while (left := sum(map(runs, ranks))) and time.monotonic() < end:
            time.sleep(0.1)
        return left
    finally:
        for pid in (parent.pid, *map(int, ranks)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a process is not told of this")
def test_a_program_that_is_killed_takes_its_ranks_along(tmp_path):
    """PyTorch asks Linux to send each process SIGINT when the one that has spawned it ends."""
    assert ranks_left(tmp_path, _probe, 10) == 0
    assert ranks_left(tmp_path, _train, 10) == 0
    assert ranks_left(tmp_path, _train_in_background, 1) == 2, "the control"
