"""rank_loader.py: a loader process ends with its rank, and not at the SIGTERM of a whole job."""

import multiprocessing
import os
import signal
import time
from unittest.mock import patch

import pytest
from torch.utils.data import DataLoader, _utils

from helpers.machine import is_running
from helpers.on_ranks import run_on_ranks
from local_ranks.ranks import PROCESS_DEFAULTS
from rank_loader import RankLoader, end_with_rank


def load_with_workers(pipe) -> None:
    """A rank with two loaders: the first ends with its rank. It sends their process ids."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torch", "pytest"])
    loaders = [
        iter(DataLoader([0.0], num_workers=1, worker_init_fn=function))
        for function in (end_with_rank, look_often)
    ]
    pipe.send([(next(loader), loader._workers[0].pid)[1] for loader in loaders])
    time.sleep(60)


def look_often(_: int) -> None:
    """torch's own workers look for their rank every 5 s; here, more often."""
    _utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2


def test_a_loader_ends_with_its_rank_and_not_before():
    """The control: of a fork server, the default since Python 3.14, a loader of torch stays."""
    ours, theirs = PROCESS_DEFAULTS.context().Pipe()
    rank = PROCESS_DEFAULTS.context().Process(target=load_with_workers, args=(theirs,))
    rank.start()
    loader, control = ours.recv()
    os.kill(loader, signal.SIGTERM)
    time.sleep(0.5)
    assert is_running(loader), "SIGTERM has ended it"
    rank.kill()
    rank.join()
    try:
        deadline = time.monotonic() + 60  # on a machine however busy
        while is_running(loader) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # the control has looked five times
        assert (is_running(loader), is_running(control)) == (False, True)
    finally:
        os.kill(control, signal.SIGKILL)


def get_sigterm() -> list[float]:
    """SIGTERM to this worker and to its parent, the rank or a fork server; then a data set."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getppid(), signal.SIGTERM)
    return [0.0]


class GetsSigterm(list):
    """A data set whose worker gets SIGTERM while it starts, when it unpickles this."""

    def __reduce__(self) -> tuple:
        return get_sigterm, ()


def start_a_worker(rank: int, ours: bool, start_method: str) -> tuple:
    """What the rank gets of a worker that got SIGTERM, how often it did itself, what it blocks."""
    signals, loader_class = [], RankLoader if ours else DataLoader
    signal.signal(signal.SIGTERM, lambda *_: signals.append(rank))
    multiprocessing.set_forkserver_preload(["torch", "pytest"])
    module, name = _utils.signal_handling, "_set_worker_signal_handlers"
    set_handlers = getattr(module, name)
    how = {"multiprocessing_context": start_method, "worker_init_fn": end_with_rank}
    # A fork unpickles nothing, but calls this copy of what torch calls first in a worker.
    with patch.object(module, name, lambda: (set_handlers(), get_sigterm())):
        try:
            answer = next(iter(loader_class(GetsSigterm([0.0]), num_workers=1, **how))).tolist()
        except RuntimeError as error:
            answer = str(error)
    return answer, len(signals), signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_sigterm_does_not_kill_a_loader_that_is_starting(start_method):
    """The control: a loader of torch that has the same init function, which then comes too late."""
    [(answer, signals, blocked)] = run_on_ranks(1, start_a_worker, True, start_method)
    assert answer == [0.0]
    assert signals == (start_method == "fork"), "the rank's own SIGTERM is not lost"
    assert blocked == set()
    [(answer, *_)] = run_on_ranks(1, start_a_worker, False, start_method)
    assert "DataLoader worker" in answer
