"""Says who is missing when programs that work together wait for one that does not come.

Who waits in vain knows neither for whom nor why. So a thread of every program notes four times a
second, where all can read it, which line its main thread has reached; who gives up reads all notes.
"""

import json
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

BEAT_SECONDS = 0.25
GRACE_SECONDS = 1.5  # for the main thread to end by itself once another rank has ended
STORE_SECONDS = 60.0  # without an answer of the store, a run is lost
LOST_SECONDS = 3.0  # the same, once a collective has failed
FINISHED = "the end of its work"


def identity(pid: int) -> list[str] | None:
    """What tells a process from all others, here and elsewhere: a PID alone is used again."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return [os.uname().nodename, os.readlink(f"/proc/{pid}/ns/pid"), str(pid), started]
    except OSError:  # it has ended, or this is not Linux
        return None


def end_with_parent(*_: object) -> None:
    """From now on, this process ends when the one that started it does, and no sooner.

    SIGTERM is often sent to all processes of a job: without its loaders, a rank could not finish.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if parent := multiprocessing.parent_process():

        def wait() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


class Watchdog:
    """Watches the main thread of a rank while the block runs, and explains a failed collective.

    store: keys and values that all ranks share. page: the file whose lines tell where a rank is.
    position: its "step" is told too.
    """

    def __init__(self, store: Any, rank: int, world_size: int, page: str) -> None:
        self.store, self.rank, self.page = store, rank, page
        self.keys = [f"rank {other}" for other in range(world_size)]
        self.position = {"step": 0}
        self.main, self.beats, self.place, self.seen = threading.get_ident(), 0, "", "its start"
        self.lost = False  # whether a collective of this rank has failed
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.answered = time.monotonic()  # when the store last did
        keeper = (
            "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        )
        self.no_store = f"no answer from the store, which {keeper} keeps: killed, stopped, or gone"

    def __enter__(self) -> "Watchdog":
        self._beat()
        self.thread.start()
        threading.Thread(target=self._guard, daemon=True).start()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.place, verdict = FINISHED, ""
        while error and trace:  # the innermost line of the page
            if trace.tb_frame.f_code.co_filename == self.page:
                self.place = self._place(trace.tb_lineno)
            trace = trace.tb_next
        name = type(error).__name__
        if isinstance(error, RuntimeError) and ("gloo" in str(error) or name.startswith("Dist")):
            self.lost = True
            verdict = self._diagnose(error)  # another rank is the reason
        with suppress(RuntimeError):  # no store, no note
            if error and not verdict and getattr(error, "code", None) != 2:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                self._first(f"rank {self.rank} ended at {self.place} with {why}")
            self._beat()
        self.over.set()
        if error and self.rank == 0:  # it may keep the store, and others still write into it
            time.sleep(2 * BEAT_SECONDS)
        self.thread.join(LOST_SECONDS)  # for ever, if it waits for a store that is stopped
        if verdict:
            self._tell(verdict)
            raise SystemExit(1) from None

    def _watch(self) -> None:
        """Note again and again where the main thread is; end it if another rank has ended."""
        well = self.answered
        while not self.over.wait(BEAT_SECONDS):
            with suppress(RuntimeError):  # of a store that is gone: _guard sees it
                self._beat()
                if not self.store.check(["verdict"]):
                    well = time.monotonic()
                elif time.monotonic() > well + GRACE_SECONDS:
                    self._end(self.store.get("verdict").decode())
                self.answered = time.monotonic()

    def _guard(self) -> None:
        """End a rank that gets no answer: with a store that is stopped, its other threads block."""
        while not self.over.wait(BEAT_SECONDS):
            if time.monotonic() > self.answered + (LOST_SECONDS if self.lost else STORE_SECONDS):
                self._end(self.no_store)

    def _beat(self) -> None:
        frame: FrameType | None = sys._current_frames()[self.main]
        while frame and frame.f_code.co_filename != self.page:
            frame = frame.f_back
        self.seen = self.place or self._place(frame.f_lineno if frame else 0)
        self.beats += 1
        note = [self.beats, self.seen, self.lost, identity(os.getpid())]
        self.store.set(self.keys[self.rank], json.dumps(note))

    def _place(self, line: int) -> str:
        code = linecache.getline(self.page, line).split("  #")[0].strip()
        return f"step {self.position['step']}, line {line}, `{code}`"

    def _notes(self) -> list[list]:
        known = [self.store.check([key]) for key in self.keys]
        return [
            json.loads(self.store.get(key)) if there else [0, "its start", False, None]
            for key, there in zip(self.keys, known, strict=True)
        ]

    def _first(self, verdict: str) -> str:
        """The verdict of the first rank that has one: it ends, and later ones would blame it."""
        return self.store.compare_set("verdict", "", verdict).decode()

    def _diagnose(self, error: RuntimeError) -> str:
        """Why a collective failed; the same answer on all ranks."""
        try:
            if self.store.check(["verdict"]):
                return self.store.get("verdict").decode()
            self._beat()
            earlier = self._notes()
            time.sleep(4 * BEAT_SECONDS)
            notes = self._notes()
            silent = [
                rank
                for rank, (now, then) in enumerate(zip(notes, earlier, strict=True))
                if now[0] == then[0] and now[1] != FINISHED and rank != self.rank
            ]
            counts = Counter(note[1] for note in notes)  # most wait where the others are missing
            waiting = max(counts, key=lambda place: (counts[place], place == self.place))
            astray = [rank for rank, note in enumerate(notes) if note[1] != waiting]
            if silent:
                verdict = (
                    f"{self._list(silent, notes)}: killed, stopped, aborted, or its machine is gone"
                )
            elif not astray:
                why = " ".join(str(error).split())
                verdict = f"all have arrived, but {why}: is the network open between the machines?"
            elif all(notes[rank][2] for rank in astray):
                wait = "; ".join(f"rank {r} at {note[1]}" for r, note in enumerate(notes[:4]))
                verdict = f"the ranks wait in different collectives, {wait}"
            else:
                verdict = self._list(astray, notes)
            if self._first(verdict) == verdict:
                for who in (notes[rank][3] for rank in silent):
                    if who and identity(int(who[2])) == who:
                        os.kill(int(who[2]), signal.SIGKILL)  # stopped, it would not hear SIGTERM
            return self._first(verdict)
        except RuntimeError:
            return self.no_store

    def _list(self, ranks: list[int], notes: list[list]) -> str:
        shown = [f"rank {r} did not arrive, last seen at {notes[r][1]}" for r in ranks[:4]]
        return "; ".join(shown) + (f"; {len(ranks) - 4} more" if len(ranks) > 4 else "")

    def _tell(self, verdict: str) -> None:
        # One write, or the lines of several ranks mix.
        sys.stderr.write(f"error: rank {self.rank} gives up at {self.seen}: {verdict}\n")
        sys.stderr.flush()

    def _end(self, verdict: str) -> None:
        self._tell(verdict)
        os._exit(1)  # the main thread may wait for ever
