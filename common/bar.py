"""A line in the terminal that shows how far long work has come. A log or a pipe gets no byte."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

SECONDS_BEFORE, SECONDS_BETWEEN = 1.0, 0.25  # the first drawing, and from one to the next
TERMINAL = Lock()  # held while a line is drawn or erased


class Bar:
    """Draws its line on stderr in a thread of its own, so that the work never waits for it.

    The cursor stays at the start of the line, so what another process prints overwrites the bar.
    """

    open: "Bar | None" = None  # a terminal has one line for it

    def __init__(
        self,
        name: str,
        total: int = 0,
        unit: str = "step",
        done: int = 0,
        note: Callable[[], str] = str,
        shown: bool = True,
    ) -> None:
        """total: 0 if unknown. done: what is done already. note: gives the line's last words."""
        self.name, self.total, self.unit, self.note = name, total, unit, note
        self.done = self.done_before = done
        self.began = self.advanced = time.monotonic()
        self.width, self.closed = 0, Event()  # width: of the line that stands there
        if shown and sys.stderr.isatty():
            close_bar()
            Bar.open = self
            Thread(target=self.draw_until_closed, daemon=True).start()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def each(self, items: Iterable) -> Iterator[Any]:
        """Yield the items; one is done when the next is asked for."""
        for item in items:
            yield item
            self.advance()

    def advance(self) -> None:
        self.done += 1
        self.advanced = time.monotonic()

    def draw_until_closed(self) -> None:
        seconds = SECONDS_BEFORE
        while not self.closed.wait(seconds):
            line, seconds = self.line(), SECONDS_BETWEEN
            with TERMINAL:
                if not self.closed.is_set():
                    self.write(line)

    def line(self) -> str:
        done, now = self.done, time.monotonic()
        parts = [self.name, clock(now - self.began)]
        if self.total:
            full, empty = "━─" if "utf" in sys.stderr.encoding.lower() else "#-"
            tenths = 10 * done // self.total
            parts[0] += f" {full * tenths + empty * (10 - tenths)} {done:,}/{self.total:,}"
            parts[0] += f" {self.unit}s"
        if done > self.done_before:
            seconds = (self.advanced - self.began) / (done - self.done_before)  # of one
            end = self.advanced + seconds * (self.total - done)
            parts.append(f"{clock(max(0, end - now))} left")
        return ", ".join(filter(None, [*parts, self.note()]))

    def write(self, line: str) -> None:
        with suppress(OSError):  # a terminal that has gone does not end the work
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = line[: columns - 1]
            sys.stderr.write(f"\r{line.ljust(self.width)}\r")
            sys.stderr.flush()
        self.width = len(line)

    def close(self) -> None:
        with TERMINAL:
            self.closed.set()
            self.erase()

    def erase(self) -> None:
        if self.width:
            self.write("")


def clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def close_bar() -> None:
    """Close the bar that is open, if any; what is printed next has a line of its own."""
    if Bar.open:
        Bar.open.close()


@contextmanager
def bar_erased() -> Iterator[None]:
    """Erase the bar while this block prints; it comes back a moment later."""
    with TERMINAL:
        if Bar.open:
            Bar.open.erase()
        yield
