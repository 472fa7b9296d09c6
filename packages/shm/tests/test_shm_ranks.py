"""The tests' own ranks: an error is told with its rank, and none of them outlives its call."""

import multiprocessing
import os
import signal
import time

import pytest

from shm_ranks import run_on_ranks


def fail_or_wait(rank, what):
    if rank == 0:
        return rank
    if what == "error":
        raise KeyError(what)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return rank


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("error", RuntimeError, "rank 1: (.|\n)*KeyError: 'error'"),
        ("killed", RuntimeError, "rank 1 ended without an answer"),
        ("waits", TimeoutError, r"ranks \[1\] did not end in 2 s"),
    ],
)
def test_a_rank_that_fails_is_named_and_none_is_left(what, error, text):
    before = multiprocessing.active_children()
    with pytest.raises(error, match=text):
        run_on_ranks(2, fail_or_wait, what, seconds=2)
    assert multiprocessing.active_children() == before


def test_a_rank_that_may_die_has_no_answer():
    assert run_on_ranks(2, fail_or_wait, "killed", may_die=[1]) == [0, None]
