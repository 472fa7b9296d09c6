"""This machine: a free port, a process that runs, a clock that stands still."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

# So gloo says on a busy machine that a rank has waited too long, instead of "Timed out waiting".
GLOO_TIMED_OUT = "Application timeout caused pair closure"


@contextmanager
def in_time(seconds: int = 120) -> Iterator[None]:
    """A time limit for what this process does itself."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stopped_clock() -> SimpleNamespace:
    """Make a stand-in for the module time that stands still unless somebody sleeps."""
    time = SimpleNamespace(now=100.0)
    time.monotonic = lambda: time.now
    time.sleep = lambda seconds: setattr(time, "now", time.now + seconds)
    return time


def is_running(pid: int | str) -> bool:
    """Is this process running? It is not if it has ended and waits for its parent to notice."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
