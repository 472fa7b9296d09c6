"""Names the rank that is missing, and its line, when the others wait for it in vain.

python beyond/survive/watchdog.py

A waiting rank cannot see which rank is missing. So a thread of each rank notes in the store, four
times per second, which line the rank has reached. A rank whose collective fails reads all notes.
Behind nccl, a rank waits for its GPU and sees no error, so its thread also reads the next rank's
notes. It counts its own notes, not seconds: while a whole job is paused, nobody writes any, and a
clock would blame the first rank that another one asks for.
"""

import json
import linecache
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
import torch.multiprocessing as mp

BEAT_SECONDS = 0.25  # from one note to the next: a beat, in which the other limits are counted
ENDED_BEATS = 20  # 5 s without a note of a process that has ended: it will never say why
NO_STORE_BEATS = 240  # 60 s after the connection to the store has broken: ranks may still finish
LOST_BEATS = 12  # 3 s without an answer from the store, after a collective has failed
GRACE_SECONDS = 1.5  # the main thread may end by itself so long after another rank has ended
# gloo raises RuntimeError, as much else does. Its message begins with a line of gloo's own source.
GLOO = re.compile(r"\[\S*\bgloo/\S+:\d+\] |Application timeout caused pair closure")
FINISHED = "the end of its work"
NO_STORE = "no answer from the store, which torchrun or rank 0 keeps: killed, stopped or gone"
UNKNOWN = json.dumps([0, "its start", False, None])  # the note of a rank that has written none


class Watchdog:
    """Watches the main thread of a rank inside the `with` block; explains a failed collective.

    store: keys and values that all ranks share. file: the script whose lines tell where a rank is.
    seconds: the time limit of the run's collectives; nobody who is only silent is given up earlier.
    step: set it to a function that tells the number of the current step.
    """

    step: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, file: str, seconds: float
    ) -> None:
        self.store = store
        self.rank = rank
        self.file = file
        self.patience = round(seconds / BEAT_SECONDS)  # in beats
        self.keys = [f"rank {other}" for other in range(world_size)]
        self.main = threading.get_ident()
        self.place = ""  # where the block has ended
        self.reached = ""  # the last place that was noted
        self.beats = 0
        self.lost = False  # whether a collective of this rank has failed
        self.broken = False  # whether the connection to the store has: it never comes back
        self.over = threading.Event()
        self.unanswered = 0  # beats since the store has answered

    def __enter__(self) -> "Watchdog":
        self._beat()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        threading.Thread(target=self._guard, daemon=True).start()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.place = FINISHED
        self.lost = error is not None and is_of_a_collective(error)
        while error and trace:  # the innermost line of the script
            if trace.tb_frame.f_code.co_filename == self.file:
                self.place = self._place(trace.tb_lineno)
            trace = trace.tb_next
        verdict = self._diagnose(error) if error and self.lost else ""
        with suppress(RuntimeError):  # without a store, no note
            if error and not self.lost and getattr(error, "code", None) != 2:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                self._first(f"rank {self.rank} ended at {self.place} with {why}")
            self._beat()
        self.over.set()
        if error and self.rank == 0:  # it may keep the store, and others still read from it
            time.sleep(2 * BEAT_SECONDS)
        self.thread.join(LOST_BEATS * BEAT_SECONDS)  # it may wait for a store that does not answer
        if verdict:
            self._tell(verdict)
            raise SystemExit(1) from None

    def _watch(self) -> None:
        """Write a note again and again; end the main thread if another rank has ended."""
        next_rank = (self.rank + 1) % len(self.keys)
        newest = 0  # the newest note of the next rank
        heard = self.beats  # when it came
        running = time.monotonic()  # when no rank had ended yet
        while not self.over.wait(BEAT_SECONDS):
            try:
                self._beat()
                [(number, place, _, process)] = self._notes(next_rank)
                if number != newest or place == FINISHED:
                    newest, heard = number, self.beats
                silence = self.beats - heard
                if silence > self.patience or (silence > ENDED_BEATS and has_ended(process)):
                    self._accuse(self._notes(), [next_rank], None)
                if not self.store.check(["verdict"]):
                    running = time.monotonic()
                elif time.monotonic() > running + GRACE_SECONDS:
                    self._end(self.store.get("verdict").decode())
                self.unanswered = 0
            except RuntimeError:  # a store that only pauses makes this thread wait, without error
                self.broken = True

    def _guard(self) -> None:
        """End a rank whose other threads wait for a store that does not answer."""
        while not self.over.wait(BEAT_SECONDS):
            self.unanswered += 1
            limit = NO_STORE_BEATS if self.broken else self.patience
            if self.unanswered > (LOST_BEATS if self.lost else limit):
                self._end(NO_STORE)

    def _beat(self) -> None:
        frame = sys._current_frames().get(self.main)
        while frame and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        self.reached = self.place or self._place(frame.f_lineno if frame else 0)
        self.beats += 1
        note = [self.beats, self.reached, self.lost, process_identity(os.getpid())]
        self.store.set(self.keys[self.rank], json.dumps(note))

    def _place(self, line: int) -> str:
        code = linecache.getline(self.file, line).split("  #")[0].strip()
        return f"step {self.step()}, line {line}, `{code}`"

    def _notes(self, *ranks: int) -> list[list]:  # notes of these ranks, or of all
        keys = [self.keys[rank] for rank in ranks] or self.keys
        there = [(key, self.store.check([key])) for key in keys]
        return [json.loads(self.store.get(key) if known else UNKNOWN) for key, known in there]

    def _first(self, verdict: str) -> str:
        """Return the verdict of the first rank that has one; others would blame it for its end."""
        return self.store.compare_set("verdict", "", verdict).decode()

    def _diagnose(self, error: BaseException) -> str:
        """Return why a collective has failed; the same answer on all ranks."""
        try:
            self._beat()
            earlier = self._notes()
            time.sleep(4 * BEAT_SECONDS)
            notes = self._notes()
            others = [r for r, note in enumerate(notes) if r != self.rank and note[1] != FINISHED]
            silent = [rank for rank in others if notes[rank][0] == earlier[rank][0]]
            return self._accuse(notes, silent, error)
        except RuntimeError:
            return NO_STORE

    def _accuse(self, notes: list[list], silent: list[int], error: BaseException | None) -> str:
        """Tell all ranks why this run ends, end the silent ones, and return the reason."""
        verdict = self._explain(notes, silent, error)
        reason = self._first(verdict)
        if reason == verdict:
            for process in (notes[rank][3] for rank in silent):
                if process and process_identity(int(process[2])) == process:  # on this machine
                    os.kill(int(process[2]), signal.SIGKILL)  # a stopped one ignores SIGTERM
        return reason

    def _explain(self, notes: list[list], silent: list[int], error: BaseException | None) -> str:
        """Return what the notes say. silent: the ranks that no longer write notes."""
        counts = Counter(note[1] for note in notes)  # most ranks wait where others are missing
        waiting = max(counts, key=lambda place: (counts[place], place == self.place))
        elsewhere = [rank for rank, note in enumerate(notes) if note[1] != waiting]
        if not silent and not elsewhere:
            return f"all ranks have arrived, but {error}: is the network open between the machines?"
        if not silent and all(notes[rank][2] for rank in elsewhere):
            places = [f"rank {rank} at {note[1]}" for rank, note in enumerate(notes[:4])]
            return f"the ranks wait in different collectives, {'; '.join(places)}"
        ranks = silent or elsewhere
        missing = [f"rank {r} did not arrive, last seen at {notes[r][1]}" for r in ranks[:4]]
        missing += [f"{len(ranks) - 4} more"] if len(ranks) > 4 else []
        return "; ".join(missing) + (": killed, stopped, aborted or unreachable" if silent else "")

    def _tell(self, verdict: str) -> None:
        text = f"error: rank {self.rank} gives up at {self.reached}: {' '.join(verdict.split())}\n"
        sys.stderr.write(text)  # one write, or the lines of several ranks mix

    def _end(self, verdict: str) -> None:
        self._tell(verdict)
        for loader in mp.active_children():  # one that hangs would stay: it ignores SIGTERM
            loader.kill()
        os._exit(1)  # the main thread may wait for a long time


def is_of_a_collective(error: BaseException) -> bool:
    """Tell whether a collective has failed, and not something else that a rank does."""
    from_gloo = type(error) is RuntimeError and GLOO.match(str(error))
    return bool(from_gloo) or isinstance(error, dist.DistError)


def process_identity(pid: int) -> list[str] | None:
    """Return what identifies a process on all machines; a PID alone is used again."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if state == "Z":  # it has ended, and its parent has not yet asked how
            return None
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [machine, os.readlink(f"/proc/{pid}/ns/pid"), str(pid), fields[18]]
    except OSError:  # it has ended, or this is not Linux
        return None


def has_ended(process: list[str] | None) -> bool:
    """Tell whether this process has ended; False where nobody can know, on another machine."""
    here = process_identity(os.getpid())
    if process is None or here is None or process[:2] != here[:2]:
        return False
    return process_identity(int(process[2])) != process


def lose_rank_1(rank: int, port: int) -> None:
    """Train for show: rank 1 is killed in step 3, and rank 0 tells where it was."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    step = 0
    with Watchdog(store.clone(), rank, 2, __file__, seconds=60) as watchdog:
        watchdog.step = lambda: step
        for step in range(1, 6):
            time.sleep(0.3)
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for process in mp.spawn(lose_rank_1, (store.port,), nprocs=2, join=False).processes:
        process.join()


if __name__ == "__main__":
    main()
