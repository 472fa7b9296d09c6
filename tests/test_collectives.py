"""What ranks say to each other: collectives.py and the table of matrix.py.

The README shows what traps.py prints; test_readmes.py runs it and compares.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import FOLDERS, ROOT, chapter, command, run_ranks

SCRIPT = "03_ddp_manual_allreduce/collectives.py"
GPUS = torch.cuda.device_count()


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


def _play(rank, world_size, names, without=()):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for call in without:
        setattr(dist, call, lambda *args, **kwargs: [])
    after = {name: chapter("03", "collectives").before_and_after(name)[1] for name in names}
    dist.destroy_process_group()
    return after


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective_gives_what_plain_lists_give(world_size):
    names = list(chapter("03", "collectives").LESSONS)
    ranks = run_ranks(world_size, _play, world_size, names)
    assert len(names) == 11
    assert [n for n in names if not right(n, [rank[n] for rank in ranks])] == []


CALLS = {
    "send_recv": ("send", "recv"),
    "isend_irecv": ("batch_isend_irecv",),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "all_reduce": ("all_reduce",),
    "gather": ("gather",),
    "all_gather": ("all_gather_into_tensor",),
    "scatter": ("scatter",),
    "reduce_scatter": ("reduce_scatter_tensor",),
    "all_to_all": ("all_to_all_single",),
}


def test_without_its_call_no_lesson_gives_that():
    """The control of the test above."""
    calls = [call for group in CALLS.values() for call in group]
    ranks = run_ranks(2, _play, 2, list(CALLS), calls)
    assert [name for name in CALLS if right(name, [rank[name] for rank in ranks])] == []


def _in_two_steps(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    lessons = chapter("03", "collectives")
    row = (rank + 1) * torch.arange(1, world_size + 1)
    return lessons.all_gather(lessons.reduce_scatter(row)), lessons.all_reduce(row.clone()), row


def test_reduce_scatter_and_all_gather_are_an_all_reduce():
    for in_two_steps, at_once, row in run_ranks(3, _in_two_steps, 3):
        assert torch.equal(in_two_steps, at_once)
        assert not torch.equal(at_once, row)


def _meet(rank, world_size, barrier):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dist.barrier()
    time.sleep(0.3 * rank)
    came = time.monotonic()
    if barrier:
        chapter("03", "collectives").barrier(torch.tensor([0]))
    return came, time.monotonic()


@pytest.mark.parametrize("barrier", [True, False], ids=["barrier", "no-barrier"])
def test_only_with_a_barrier_nobody_goes_on_before_all_have_come(barrier):
    came, left = zip(*run_ranks(3, _meet, 3, barrier), strict=True)
    assert (max(came) <= min(left)) == barrier


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_table_shows_what_every_rank_holds(world_size):
    [(status, output)] = command(SCRIPT, f"--world-size={world_size}")
    assert status == 0, output
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()[2:]]
    names = [row[0] for row in rows[::2]]
    assert names == list(chapter("03", "collectives").LESSONS)
    for name, after in zip(names, rows[1::2], strict=True):
        cells = [re.findall(r"\d+", cell) for cell in after[1:]]
        assert right(name, [list(map(int, cell)) for cell in cells]), (name, after)
        assert ("no other rank" in after) == (world_size == 1 and "send" in name)


# --- Which backend can do what


def _nccl_takes(rank):
    try:
        dist.init_process_group("nccl", rank=rank, world_size=1)
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        return type(error).__name__
    return "yes"


def test_the_matrix_agrees_with_probes_of_its_own():
    [(status, output)] = command(SCRIPT, "--matrix")
    assert status == 0, output
    table, _, reasons = output.partition("\n\n")
    header, _, *lines = (re.split(r" {2,}", line) for line in table.splitlines())
    assert header[1:] == [f"{b} {d}" for b in ("gloo", "nccl", "mpi") for d in ("cpu", "cuda")]
    cells = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in lines}
    ranks = run_ranks(2, _play, 2, list(cells))
    assert len(cells) == 11
    for name, cell in cells.items():
        gloo = "yes" if right(name, [rank[name] for rank in ranks]) else "no"
        assert cell["gloo cpu"] == gloo
        assert GPUS > 0 or cell["gloo cuda"] == "no device"
        assert GPUS > 1 or cell["nccl cuda"] == "no device"
        assert dist.is_mpi_available() or cell["mpi cpu"] == cell["mpi cuda"] == "not built"
    assert (cells["all_reduce"]["nccl cpu"] == "yes") == (run_ranks(1, _nccl_takes)[0] == "yes")
    assert f"torch {torch.__version__}" in reasons
    assert "nccl cpu: no: " in reasons, "every no tells why"


SPOILT = {  # the first is not: it waits while the forkserver imports torch
    "all_reduce": ("yes", ""),
    "broadcast": ("no", "wrong numbers"),
    "reduce": ("no", "SIGABRT"),
    "scatter": ("no", "not done after 2 s"),
    "all_to_all": ("no", "RuntimeError: of the test"),
    "barrier": ("yes", ""),
}


def spoil(folder, calls, probes) -> subprocess.Popen:
    """A program beside copies of the chapters, with calls replaced, that makes these probes."""
    source = (ROOT / SCRIPT).read_text()
    for call, instead in calls.items():
        assert source.count(call) == 1
        source = source.replace(call, instead)
    (folder / "collectives.py").write_text(source)
    for name in ("matrix.py", "ranks.py"):
        (folder / name).write_text((FOLDERS["03"] / name).read_text())
    lines = ["from matrix import probe", "if __name__ == '__main__':"]
    for name, seconds in probes:
        lines += [f"    print(*probe('gloo', 'cpu', {name!r}, {seconds}), sep=': ')"]
    (folder / "probes.py").write_text("\n".join(lines))
    return subprocess.Popen(
        [sys.executable, "probes.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # all that it starts can then be told by the session's number
    )


def test_a_probe_that_hangs_crashes_or_lies_says_no_and_leaves_no_process(tmp_path):
    calls = {
        "dist.broadcast(tensor, src=0)": "pass",
        "dist.reduce(tensor, dst=0)": "import os; os.abort()",
        "dist.all_to_all_single(column, row)": "raise RuntimeError('of the test')",
        "dist.scatter(part": "import time; time.sleep(999); dist.scatter(part",
    }
    probes = [(name, 60 if name == "all_reduce" else 2) for name in SPOILT]
    process = spoil(tmp_path, calls, probes)
    output, _ = process.communicate(timeout=60)
    answers = [line.split(": ", 1) for line in output.splitlines()]
    for (name, (cell, reason)), answer in zip(SPOILT.items(), answers, strict=True):
        assert answer[0] == cell, name
        assert reason in answer[1], name
    assert not left_of(process.pid)


def test_a_program_that_is_killed_leaves_no_rank_behind(tmp_path):
    hang = "open(str(dist.get_rank()), 'w'); import time; time.sleep(999); dist.scatter(part"
    calls = {"dist.scatter(part": hang}
    process = spoil(tmp_path, calls, [("scatter", 60)])
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert process.poll() is None
        time.sleep(0.1)
    assert len(left_of(process.pid, seconds=0.5)) >= 4, "itself, its forkserver and two ranks"
    process.kill()
    process.wait(timeout=60)
    left = left_of(process.pid)
    if left:  # only what this test started
        os.killpg(process.pid, signal.SIGKILL)
    assert not left


SIGNAL = "signal.signal(signal.SIGINT, signal.SIG_DFL)"


def ranks_after_sigterm(folder: Path, seconds: float, without: str = "") -> list[int]:
    """Start train.py with `&` in a script, end it while its ranks train; which of them stay?"""
    for name in ("train.py", "partition.py"):
        source = (FOLDERS["03"] / name).read_text()
        assert name != "train.py" or not without or source.count(without) == 1
        (folder / name).write_text(source.replace(without, "pass") if without else source)
    flags = f"--world-size 2 --epochs 100000 --device cpu --data-dir {ROOT / 'data'}"
    script = f"{sys.executable} train.py {flags} & echo $!; wait"  # `&`: SIGINT is ignored
    shell = subprocess.Popen(
        ["sh", "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    launcher, ranks = int(shell.stdout.readline()), []
    try:
        assert any(line.startswith("epoch 1/") for line in shell.stdout), "it never trained"
        ranks = children(launcher)
        assert len(ranks) == 2
        os.kill(launcher, signal.SIGTERM)
        shell.wait(60)
        end = time.monotonic() + seconds
        while (left := [pid for pid in ranks if is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.1)
        return left
    finally:
        for pid in (launcher, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shell.wait(60)
        shell.stdout.close()


def children(parent: int) -> list[int]:
    """The ranks that a process has started; not the process that keeps track of semaphores."""
    question = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent)]
    done = subprocess.run(question, capture_output=True, text=True)
    return [int(line.split()[0]) for line in done.stdout.splitlines() if "spawn_main" in line]


def is_alive(pid: int) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a process is not told of this")
def test_a_launcher_in_the_background_that_is_ended_takes_its_ranks_along(tmp_path):
    assert ranks_after_sigterm(tmp_path, seconds=10) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a process is not told of this")
def test_with_sigint_ignored_the_ranks_would_stay(tmp_path):
    """The control."""
    assert len(ranks_after_sigterm(tmp_path, seconds=2, without=SIGNAL)) == 2


def left_of(session: int, seconds: float = 5) -> list[str]:
    """Processes of a session that are still there; the forkserver goes a moment after its user."""
    end = time.monotonic() + seconds
    while True:
        done = subprocess.run(["ps", "-eo", "sid,stat,args"], capture_output=True, text=True)
        alive = [line.split(None, 2) for line in done.stdout.splitlines()[1:]]
        left = [args for sid, stat, args in alive if int(sid) == session and stat[0] != "Z"]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
@pytest.mark.parametrize("name", ["broadcast", "all_reduce"])
def test_two_gloo_ranks_share_a_gpu(name):
    assert chapter("03", "matrix").probe("gloo", "cuda", name, 60) == ("yes", "")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", [*CALLS, "barrier"])
def test_nccl_does_everything_on_gpus(name):
    assert chapter("03", "matrix").probe("nccl", "cuda", name, 60) == ("yes", "")


WRONG = [
    (("--world-size=0",), ("--world-size", "'0'", "whole number, from 1 to 18")),
    (("--world-size=-1",), ("--world-size", "'-1'")),
    (("--world-size=two",), ("--world-size", "'two'")),
    (("--seconds=0", "--matrix"), ("--seconds", "'0'")),
    (("--backend=tcp",), ("--backend", "'tcp'", "gloo")),
    (("--backend=nccl", f"--world-size={GPUS + 1}"), ("nccl", f"{GPUS + 1} ranks", "gloo")),
    (("--backend=mpi",), ("--backend mpi", "--backend gloo")),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_wrong_flags_are_refused_in_one_line(flags, words):
    [(status, output)] = command(SCRIPT, *flags)
    assert status == 2
    assert len(output.splitlines()) == 1, output
    assert all(word in output for word in words), output
