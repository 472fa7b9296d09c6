"""Let the stages' own programs train in turns: those that wait are stopped by the system.

Each program starts once, and warms up in its first epoch. Then, in each round, every program trains
for a turn, while all others stand still (SIGSTOP): a slow minute of the machine hits them alike,
and nobody measures how a program starts. A step's time is what the program itself has written to
metrics.jsonl, so a turn ends when the lines of its epochs are there. Its first step is longer by
the time that the program stood still, which a median over the turn does not see.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.measure.timing import Times, interleave_runs
from benchmarks.variants import VARIANTS, Layout, script_of
from common.bar import progress_bar
from common.run_folder import set_aside
from local_ranks.machine import KEEP_FREED_MEMORY
from local_ranks.ranks import PROCESS_DEFAULTS
from local_ranks.run_files import read_metrics
from local_ranks.scripts import start_script, store_of_a_launcher
from shm.cores import pin

POLL_SECONDS = 0.01
MANY = 10**6  # epochs: more than anybody waits for


class Program:
    """One of VARIANTS: its processes, and the folders where they write metrics.jsonl."""

    first_turn: list[float]  # the seconds of the steps in which it warmed up

    def __init__(self, key: str, ranks: int, flags: Sequence[str], folder: Path) -> None:
        """Start it in this folder, with these flags of train.py. It trains until it is paused."""
        variant, device = VARIANTS[key], "cuda" if "--device=cuda" in flags else "cpu"
        self.label, self.never_ends = variant.title(ranks), variant.layout is Layout.APART
        (script, *others), number = script_of(key, ranks, device)
        flags, threads = [*others, *flags], (os.cpu_count() or 1) if variant.all_cores else 1
        env = {"OMP_NUM_THREADS": str(threads)}
        env |= KEEP_FREED_MEMORY if variant.keeps_memory else {}
        self.folders, self.store = [folder], None
        if self.never_ends:  # so that all of them train in each turn, to its end
            flags += [f"--epochs={MANY}", f"--max-steps={MANY}"]
            self.folders = [folder / str(n) for n in range(number)]
        elif number > 1:
            self.store, variables = store_of_a_launcher(number)
            env |= variables
        self.processes: list[BaseProcess] = []
        for n, at in enumerate(self.folders):
            at.mkdir(parents=True, exist_ok=True)
            set_aside(at)  # before the program does: its first line is to be the first in the file
            self.processes += start_script(
                os.path.abspath(script),
                *flags,
                f"--run-dir={at}",
                output=str(at / "output"),
                processes=1 if self.never_ends else number,
                env=env | (gpu_of_its_own(n, number) if self.never_ends else {}),
                cwd=os.getcwd(),
                own_group=True,
                forks=device == "cpu",
            )
        if self.never_ends and sys.platform == "linux" and device == "cpu":
            for n, process in enumerate(self.processes):
                pin(n, number, process.pid or 0)  # as `-m shm` does with ranks
        self.lines = [0] * len(self.folders)  # of metrics.jsonl, read so far
        self.marks: list[tuple[int, int]] = []  # see mark_page_faults

    def signal(self, number: int) -> None:
        """Send it to all of its processes that live, and to those that they have started."""
        for process in self.processes:
            if process.is_alive() and process.pid:
                with suppress(ProcessLookupError):  # it is just starting, or has just ended
                    os.killpg(process.pid, number)

    def take_turn(self, steps: int) -> list[float]:
        """Train until so many further steps are written, or to the end; return their seconds."""
        self.signal(signal.SIGCONT)
        seconds: list[list[float]] = [[] for _ in self.folders]
        sizes = [0] * len(self.folders)
        while any(len(each) < steps for each in seconds):
            time.sleep(POLL_SECONDS)
            has_ended = not any(process.is_alive() for process in self.processes)
            self.fail_if_a_process_has_failed()
            for n, folder in enumerate(self.folders):
                if (size := size_of(folder / "metrics.jsonl")) != sizes[n]:  # to look costs little
                    new = read_metrics(folder)[self.lines[n] :]
                    sizes[n], seconds[n] = size, [line["seconds"] for line in new]
            if has_ended:
                break
        self.signal(signal.SIGSTOP)
        for n, each in enumerate(seconds):
            self.lines[n] += len(each)
        self.mark_page_faults()
        return [second for each in seconds for second in each]

    def mark_page_faults(self) -> None:
        """Note how often the first process has got a new page of memory, after how many steps."""
        with suppress(OSError):  # it has ended, or there is no /proc
            fields = Path(f"/proc/{self.processes[0].pid}/stat").read_text().rpartition(")")[2]
            # minflt, see man 5 proc_pid_stat
            self.marks.append((self.lines[0], int(fields.split()[7])))

    def page_faults_of_a_step(self) -> int | None:
        """Count the page faults of the first process, from its first turn on."""
        if len(self.marks) < 2:
            return None
        (steps, faults), (last_steps, last_faults) = self.marks[0], self.marks[-1]
        return round((last_faults - faults) / (last_steps - steps))

    def finish(self) -> None:
        """Let it come to its end, which comes after its last epoch."""
        self.signal(signal.SIGCONT)
        while not self.never_ends and any(process.is_alive() for process in self.processes):
            time.sleep(POLL_SECONDS)
            self.fail_if_a_process_has_failed()

    def fail_if_a_process_has_failed(self) -> None:
        """Print what the program has printed, and raise SystemExit with its status."""
        for process in self.processes:
            if process.exitcode:
                for path in sorted(path for at in self.folders for path in at.glob("output.*")):
                    with tqdm.external_write_mode():
                        print(path.read_text(), end="", file=sys.stderr)
                with tqdm.external_write_mode():
                    text = f"error: {self.label} ended with status {process.exitcode}"
                    print(text, file=sys.stderr)
                raise SystemExit(abs(process.exitcode))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.kill()  # if it has no group yet
            process.join()


def gpu_of_its_own(number: int, processes: int) -> dict[str, str]:
    """Return the variable that gives a process a GPU of its own, if there are enough."""
    if torch.cuda.device_count() < processes:
        return {}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": gpus[number]}


def kill_orphans(groups: Connection) -> None:
    """Receive the numbers of process groups, and kill them if their sender ends without None.

    Whoever is stopped does not notice that nobody will let it go on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the sender deals with it
    orphans: list[int] = []
    try:
        while (group := groups.recv()) is not None:
            orphans.append(group)
    except EOFError:
        for group in orphans:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Plan(NamedTuple):
    """How much each program trains: an epoch that warms it up, and then `rounds` turns."""

    epoch_steps: int
    rounds: int
    epochs_a_turn: int = 1

    @property
    def epochs(self) -> int:
        return 1 + self.rounds * self.epochs_a_turn

    @property
    def turn_steps(self) -> int:
        return self.epoch_steps * self.epochs_a_turn


@contextmanager
def warmed_up(
    runs: Mapping[str, tuple[str, Sequence[str]]],
    ranks: int,
    epoch_steps: int,
    folder: Path,
    may_fail: Collection[str] = (),
) -> Iterator[dict[str, Program]]:
    """Start programs one after the other, let each train an epoch, and kill them at the end.

    runs: by name, the key of VARIANTS and the flags of train.py. may_fail: names that are left out
    if they end with an error in their first epoch, which has been printed then.
    """
    started: list[Program] = []
    programs: dict[str, Program] = {}
    context = PROCESS_DEFAULTS.context()
    receiver, groups = context.Pipe(duplex=False)
    guard = context.Process(target=kill_orphans, args=(receiver,))
    guard.start()
    receiver.close()
    try:
        for name, (key, flags) in progress_bar("warming up", [*runs.items()], unit="program"):
            started.append(Program(key, ranks, flags, folder / name.replace("/", "")))
            for process in started[-1].processes:
                groups.send(process.pid)
            try:
                started[-1].first_turn = started[-1].take_turn(epoch_steps)
            except SystemExit:
                if name not in may_fail:
                    raise
            else:
                programs[name] = started[-1]
        yield programs
    finally:
        for program in started:
            program.kill()
        groups.send(None)
        guard.join()


def take_turns(
    programs: Mapping[str, Program],
    plan: Plan,
    average: Callable[[list[float]], float] = median,
) -> Times:
    """Let each program train a turn in every round; average: of the steps of one turn.

    Without a round, there are the steps in which the programs warmed up.
    """
    if not plan.rounds:
        return {name: [average(program.first_turn)] for name, program in programs.items()}
    with progress_bar("in turns", total=plan.rounds * len(programs), unit="turn") as bar:

        def run_of(program: Program) -> Callable[[], float]:
            def run() -> float:
                bar.update()
                return average(program.take_turn(plan.turn_steps))

            return run

        runs = {name: run_of(program) for name, program in programs.items()}
        return interleave_runs(runs, plan.rounds)
