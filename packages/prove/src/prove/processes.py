"""Start the user's command, watch it, and wait until it ends or hangs.

If the command is torchrun, the ranks are forked from this process, which has imported torch
already; the whole proof then takes no longer than starting the script by itself. Any other command
is started as it is, and finds `hooks/sitecustomize.py` on its path.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from prove.rank_record import (
    SECONDS_PER_BEAT,
    STARTED_IN,
    Ended,
    Mode,
    RankRecord,
    RunOutcome,
    Settings,
    end_process,
    read_records,
)

ONE_RANK_MODES = (Mode.REPLAY, Mode.GLOBAL_BATCHNORM, Mode.SEQUENCE, Mode.ORIGINAL)
HOOKS = Path(__file__).parent / "hooks"
RANK, WORLD_SIZE = "{rank}", "{world_size}"  # in a command that starts each rank by itself
WARNING_FILTERS = warnings.filters[:]  # the usual filters, for the script: prove changes its own
REPLACED_STREAMS: list[Any] = []  # kept alive: a collected stream would close its descriptor
SECONDS_UNTIL_SURE = 1.5  # ranks that wait for different things hang after this time
BEATS_OF_A_LIVE_RANK = 4  # with fewer beats since the last progress, a rank may only be slow
SECONDS_AFTER_FAILURE = 3.0  # time for the other ranks to end after one has failed


class Torchrun(NamedTuple):
    """A torchrun for one node, whose ranks we can start ourselves."""

    world_size: int
    script: list[str]  # path and arguments
    sets_variables: bool = True  # False: each rank is told its number by an argument


def names_ranks(command: list[str]) -> bool:
    """Does the command start a single rank, as python train.py --rank {rank} ... does?"""
    is_python = (
        len(command) > 1 and "python" in Path(command[0]).name and command[1].endswith(".py")
    )
    return is_python and all(name in " ".join(command) for name in (RANK, WORLD_SIZE))


def with_numbers(command: list[str], rank: int, world_size: int) -> list[str]:
    return [word.replace(RANK, str(rank)).replace(WORLD_SIZE, str(world_size)) for word in command]


def as_torchrun(command: list[str]) -> Torchrun | None:
    """Read a command whose ranks prove can fork itself; return None for any other command."""
    arguments = command[1:]
    if names_ranks(command):
        return Torchrun(2, arguments, sets_variables=False)
    if arguments[:2] == ["-m", "torch.distributed.run"] and "python" in Path(command[0]).name:
        arguments = arguments[2:]
    elif Path(command[0]).name != "torchrun":
        return None
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(arguments)
    one_node = args.nnodes in ("1", "1:1") and args.nproc_per_node.isdigit()
    if not one_node or args.module or not args.training_script.endswith(".py"):
        return None
    return Torchrun(int(args.nproc_per_node), [args.training_script, *args.training_script_args])


def listener_on_a_free_port() -> socket.socket:
    """Listen on a free port to keep it: another program could take a port that is only known."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def preload() -> None:
    """Import torch and its optimizers once, before ranks are forked from this process."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.utils.data

    from prove.watch import observe  # noqa: F401  imports all watchers

    torch.set_num_threads(1)  # a process with a pool of threads must not fork


def hook_variables(environment: Mapping[str, str], folder: Path, module: str) -> dict[str, str]:
    """Return variables that make each process of a command watch itself.

    After it has imported torch, each process calls install() of `module` in `folder`.
    """
    paths = [str(HOOKS), environment.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {"PYTHONPATH": path, "PROVE_AFTER_TORCH": f"{folder}:{module}"}


def begin_as(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Make this forked process look like one that has just started for the script."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.filters[:] = WARNING_FILTERS  # type: ignore[index]
    out = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    REPLACED_STREAMS.extend((sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))


def become_rank(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Run the script as a rank in this forked process, and end with it."""
    status = 1
    try:
        begin_as(command, environment, log)
        import torch

        from prove.watch import observe

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        this_run = observe.install()
        try:
            runpy.run_path(command[0], run_name="__main__")
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except BaseException as error:
            this_run.write_failure(error)
            traceback.print_exc()
        this_run.write(Ended.FINISHED if status == 0 else Ended.WITH_ERROR)
    except BaseException:  # a bug in prove, which end_process would not print
        traceback.print_exc()
        status = 1
    finally:
        end_process(status)


class SpareProcess:
    """A separate Python process that imports torch in advance and then becomes rank 1 of one run.

    Forked ranks share one seed for hashing strings, but under torchrun each rank has its own. This
    rank has its own, too, so it shows if data depend on hash() or on the order of a set.
    """

    def __init__(self) -> None:
        # Ctrl-C reaches both processes; only the main one acts on it, and ends this one.
        code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        code += "from prove import processes; processes.become_what_is_asked_for()"
        self.process: subprocess.Popen | None = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, text=True
        )

    def become_rank(self, command: list[str], environment: dict[str, str], log: Path) -> int:
        """Let the spare process become a rank, which it can only once; return its process id."""
        process, self.process = self.process, None
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps([command, environment, str(log)]) + "\n")
        process.stdin.flush()
        return process.pid

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def become_what_is_asked_for() -> None:
    preload()
    if request := sys.stdin.readline():
        command, environment, log = json.loads(request)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        become_rank(command, environment, Path(log))


class Processes:
    """Starts and ends the processes of one run: forked ranks, or the user's launcher."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        spare: SpareProcess | None = None,
    ) -> None:
        self.status, self.failed_at = 0, 0.0
        self.spare = spare
        self.store: Any = None
        self.alive: list[int] = []
        if torchrun := as_torchrun(command):
            self.fork(torchrun, environment, log)
        else:
            environment |= hook_variables(environment, HOOKS.parents[1], "prove.watch.observe")
            with log.open("w") as out:
                started = subprocess.Popen(
                    command, env=environment, stdout=out, stderr=out, start_new_session=True
                )
            self.alive.append(started.pid)
        self.all = list(self.alive)

    def fork(self, torchrun: Torchrun, environment: dict[str, str], log: Path) -> None:
        preload()
        world_size, listener = torchrun.world_size, listener_on_a_free_port()
        port = listener.getsockname()[1]
        common = {
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "prove", "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        sys.stdout.flush()
        for rank in range(world_size):
            own, script = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}, torchrun.script
            if not torchrun.sets_variables:
                # The script may spawn its rank, once per node: mp.spawn(main, nprocs=args.gpus).
                own = hook_variables(environment, HOOKS.parents[1], "prove.watch.observe")
                script = with_numbers(script, rank, world_size)
            if rank == 1 and self.spare is not None and self.spare.process is not None:
                pid = self.spare.become_rank(script, environment | own, log)
            else:
                pid = os.fork()
            if pid == 0:
                listener.close()
                become_rank(script, environment | own, log)
            self.alive.append(pid)
        from torch.distributed import TCPStore

        # The store lives here, as in torchrun: if rank 0 held it, its end would break the others.
        self.store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    def are_running(self) -> bool:
        for pid in list(self.alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.alive.remove(pid)
                if status and not self.failed_at:
                    self.status = os.waitstatus_to_exitcode(status)
                    self.failed_at = time.monotonic()
        others_wait = self.failed_at and self.alive
        if others_wait and time.monotonic() - self.failed_at > SECONDS_AFTER_FAILURE:
            self.end([])  # torchrun, too, ends all ranks when one has failed
        return bool(self.alive)

    def end(self, more: list[int]) -> None:
        """Kill all processes of this run and their children."""
        for pid in [*self.all, *more]:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for pid in list(self.alive):
            os.waitpid(pid, 0)
            self.alive.remove(pid)
        self.store = None


def is_waiting(rank: RankRecord) -> bool:
    progress = rank.progress
    in_a_call = progress.collective or progress.waits_in or progress.in_backward or progress.in_ddp
    return bool(in_a_call) or rank.ended != Ended.NOT_YET


def is_loading(rank: RankRecord) -> bool:
    return rank.progress.is_loading and not is_waiting(rank)


def wait_for_different_things(records: list[RankRecord]) -> bool:
    """Do all ranks wait or have ended, for different things, so that no message can come?"""
    if (
        len(records) < 2
        or len(records) < records[0].world_size
        or not all(map(is_waiting, records))
        or any(rank.progress.waits_in for rank in records)  # a message may still be on its way
    ):
        return False
    places: set[tuple[int, str]] = set()  # number and name of each rank's collective
    for rank in records:
        if rank.progress.collective:
            places.add((len(rank.collectives), rank.progress.collective.name))
        elif rank.ended != Ended.WITH_ERROR:
            places.add((-1, rank.ended))
    return any(rank.progress.collective for rank in records) and len(places) > 1


class ProgressWatch:
    """Measures how long ago the ranks made their last progress."""

    def __init__(self) -> None:
        self.last: list[tuple] = []
        self.since = time.monotonic()
        self.beats: dict[int, int] = {}  # beats of each rank at its last progress

    def seconds_without(self, records: list[RankRecord]) -> float:
        now = [
            (rank.progress.events, rank.ended, not is_waiting(rank) and rank.progress.cpu_seconds)
            for rank in records
        ]
        if now != self.last:
            self.last, self.since = now, time.monotonic()
            self.beats = {rank.rank: rank.progress.beats for rank in records}
        alive = [rank for rank in records if rank.ended == Ended.NOT_YET]
        beats = [rank.progress.beats - self.beats[rank.rank] for rank in alive]
        if any(number < BEATS_OF_A_LIVE_RANK for number in beats):
            return 0.0
        return time.monotonic() - self.since


def run_command(
    command: list[str],
    settings: Settings,
    timeout: float,
    most_seconds: float = float("inf"),
    spare: SpareProcess | None = None,
    tell: Callable[[float, list[RankRecord]], None] = lambda seconds, records: None,
) -> RunOutcome:
    """Start a command, wait until all ranks have ended or hang, and read what they wrote.

    After most_seconds, the command is ended as if it had ended well. spare becomes rank 1. tell: is
    called again and again with the seconds so far and the records.
    """
    began = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PROVE": json.dumps(asdict(settings))}
    environment[STARTED_IN] = os.getcwd()
    takes_all = settings.shares_out_cores and settings.mode in ONE_RANK_MODES
    if takes_all and environment["OMP_NUM_THREADS"].isdigit():
        threads = int(environment["OMP_NUM_THREADS"]) * settings.world_size
        environment["OMP_NUM_THREADS"] = str(min(threads, os.cpu_count() or 1))
    log = Path(settings.folder, f"{settings.name}.log")
    processes = Processes(command, environment, log, spare)
    hang = silent = False
    progress, next_look = ProgressWatch(), began
    try:
        while processes.are_running():
            time.sleep(0.03)
            if time.monotonic() - began > most_seconds:
                break
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + SECONDS_PER_BEAT
            records = read_records(settings.folder, settings.name)
            tell(time.monotonic() - began, records)
            # Before ranks meet, and while one loads data, downloads and workers may take long.
            limit = timeout if records and not any(map(is_loading, records)) else 10 * timeout
            if wait_for_different_things(records):
                limit = SECONDS_UNTIL_SURE
            if progress.seconds_without(records) > limit:
                hang = bool(records) and all(map(is_waiting, records))
                silent = not hang
                break
    finally:
        processes.end([rank.pid for rank in read_records(settings.folder, settings.name)])
    text = log.read_text(errors="replace") if log.exists() else ""
    records = read_records(settings.folder, settings.name)
    return RunOutcome(processes.status, text, hang, silent, records, time.monotonic() - began)
