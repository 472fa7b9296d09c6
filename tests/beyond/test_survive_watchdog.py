"""watchdog.py ends what it means and nothing else, tells errors from missing ranks, works in C.

Who is missing, and what all ranks then say: test_injected_faults.py, in real runs.
"""

import ctypes
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import watchdog
from helpers.machine import GLOO_TIMED_OUT, stopped_clock
from helpers.on_ranks import run_on_ranks
from local_ranks.ranks import PROCESS_DEFAULTS
from local_ranks.stage_files import LESSON_FOLDERS, fresh_module


def new_watchdog(rank: int = 0, world_size: int = 2):
    """One that is not started, with a limit of 600 s, and the clock that it looks at."""
    module = fresh_module(LESSON_FOLDERS["survive"] / "watchdog.py")
    module.time = stopped_clock()
    return module.Watchdog(dist.HashStore(), rank, world_size, __file__, 600), module.time


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_process_that_wrote_a_note_is_ended(same):
    """The control: its number now belongs to a process that started at another time."""
    dog, _ = new_watchdog()
    process = PROCESS_DEFAULTS.context().Process(target=time.sleep, args=(60,))
    process.start()
    who = watchdog.process_identity(process.pid)
    place = "step 3, line 2, `b()`"
    note = [7, place, False, who if same else [*who[:-1], "0"]]
    dog.store.set("rank 1", json.dumps(note))
    verdict = (
        f"rank 1 did not arrive, last seen at {place}: killed, stopped, aborted or unreachable"
    )
    assert dog._diagnose(RuntimeError(CLOSED)) == verdict
    process.join(9 if same else 0.2)
    assert process.is_alive() != same
    process.kill()
    process.join()


LIMITS = {  # what is known, and the seconds after which a rank ends
    "the store does not answer": ([], 600.25),
    "the connection to it is broken": (["broken"], 60.25),
    "a collective has failed, too": (["lost", "broken"], 3.25),
}


@pytest.mark.parametrize("case", LIMITS)
@pytest.mark.parametrize("pause", [0, 100_000])
def test_a_rank_ends_without_a_store_but_a_pause_of_the_whole_job_counts_as_one_beat(case, pause):
    """The pause comes after 1 s, and the limit of the run is 600 s."""
    flags, seconds = LIMITS[case]
    dog, time = new_watchdog()
    for flag in flags:
        setattr(dog, flag, True)
    ended, began = [], time.now
    dog._end = lambda verdict: ended.append((time.now - began, verdict))

    def wait(seconds: float) -> bool:
        time.now += seconds + (pause if time.now == began + 1 else 0)
        return bool(ended) or time.now > began + pause + 1000

    dog.over = SimpleNamespace(wait=wait)
    dog._guard()
    assert ended == [(seconds + pause, watchdog.NO_STORE)]


CLOSED = "[/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer"
NO_NETWORK = "all ranks have arrived, but {}: is the network open between the machines?"
FULL = "cannot write runs/gloo-test/checkpoint.pt ([Errno 28] No space left on device)"
OWN = "a parameter was not used in DistributedDataParallel"  # has a word that gloo's errors have
ERRORS = [  # how the block ends, on which rank, and what all ranks learn
    (None, 0, " "),
    (SystemExit(2), 0, " "),
    (RuntimeError(OWN), 0, f"rank 0 ended at PLACE with RuntimeError: {OWN}"),
    (SystemExit("two\nlines"), 1, "rank 1 ended at PLACE with SystemExit: two lines"),
    (ValueError(FULL), 0, f"rank 0 ended at PLACE with ValueError: {FULL}"),
    (RuntimeError(FULL), 0, f"rank 0 ended at PLACE with RuntimeError: {FULL}"),
    (ValueError(CLOSED), 0, f"rank 0 ended at PLACE with ValueError: {CLOSED}"),
    (RuntimeError(CLOSED), 0, NO_NETWORK.format(CLOSED)),
    (RuntimeError(GLOO_TIMED_OUT), 0, NO_NETWORK.format(GLOO_TIMED_OUT)),
    (dist.DistBackendError("nccl"), 0, NO_NETWORK.format("nccl")),
]
PLACE = r"step 4, line \d+, `raise error`"


@pytest.mark.parametrize(("error", "rank", "verdict"), ERRORS, ids=repr)
def test_an_error_of_its_own_is_not_taken_for_a_missing_rank(error, rank, verdict, capsys):
    dog, _ = new_watchdog(rank, rank + 1)
    dog.step, ended = lambda: 4, None
    try:
        with dog:
            assert dog.store.check([f"rank {rank}"]), "a note at once"
            if error:
                raise error
    except BaseException as caught:
        ended = caught
    is_lost = verdict.startswith("all ranks")
    assert repr(ended) == ("SystemExit(1)" if is_lost else repr(error))
    reported = dog.store.compare_set("verdict", "", " ").decode()
    assert re.fullmatch(re.escape(verdict).replace("PLACE", PLACE), reported)
    printed = rf"error: rank {rank} gives up at {PLACE}: {re.escape(verdict)}\n" if is_lost else ""
    assert re.fullmatch(printed, capsys.readouterr().err)
    _, place, lost, process = json.loads(dog.store.get(f"rank {rank}"))
    assert re.fullmatch(PLACE if error else "the end of its work", place)
    assert (lost, process) == (is_lost, watchdog.process_identity(os.getpid()))
    assert not dog.thread.is_alive()


def wait_in_c(rank: int, how: str, seconds: float, beats: int, pause: int, file: Path) -> str:
    """Rank 1 dies or stops. Rank 0 waits in C, where no error and no signal reaches it, as behind
    nccl, and after this pause lets a stopped rank go on."""
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    module = fresh_module(LESSON_FOLDERS["survive"] / "watchdog.py")
    module.ENDED_BEATS = beats
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
    with module.Watchdog(store, rank, 2, __file__, seconds):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        else:
            ctypes.CDLL(None).sleep(pause)
            if how == "stopped":
                os.kill(int(store.get("pid")), signal.SIGCONT)
        if how == "stopped":
            dist.barrier()
    return "waited"


WAITS_IN_C = [  # the limit of the run in seconds; the beats after which a dead process is given up;
    # the pause in seconds, which is not over before a rank that must end has ended
    ("killed", 600, 2, 100, [None, None]),
    ("killed", 600, 80, 3, ["waited", None]),  # the control: 20 s
    (
        "stopped",
        4,
        80,
        100,
        [None, None],
    ),  # beyond the limit: rank 1 gets SIGKILL, or it would stay
    ("stopped", 600, 2, 3, ["waited", "waited"]),  # the control: not beyond it
]


@pytest.mark.parametrize(("how", "seconds", "beats", "pause", "ends"), WAITS_IN_C)
def test_a_rank_that_waits_for_a_gpu_learns_that_another_died(
    how, seconds, beats, pause, ends, tmp_path
):
    file = tmp_path / "said"
    ends_of_ranks = run_on_ranks(2, wait_in_c, how, seconds, beats, pause, file, may_die=(0, 1))
    assert ends_of_ranks == ends
    named = "error: rank 0 gives up at .+`ctypes.+: rank 1 did not arrive, last .+ unreachable"
    assert bool(re.search(named, file.read_text())) == (ends[0] is None)
