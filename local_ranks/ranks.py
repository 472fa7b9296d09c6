"""Ranks on this machine: processes that join a group, and return what a function computes.

    run_ranks(4, function, argument)  # what function(rank, argument) returns on each of four ranks

A fork server imports torch once, and each rank is a copy of it that is there in milliseconds. A
chapter that torchrun starts calls init_gloo_or_refuse instead.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.options import UsageError

# Rank 0 need not make the store, because its launcher has one.
STORE_OF_A_LAUNCHER = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
SLOW_MODULES = ("torch", "torchvision", "matplotlib.pyplot", "tabulate")


@dataclass
class ProcessDefaults:
    """How this process starts others."""

    start_method: str = "forkserver"  # "fork" in a process that has imported torch already
    preloaded: list[str] = field(default_factory=list)  # if empty, those of SLOW_MODULES

    def context(self) -> Any:
        slow = [name for name in SLOW_MODULES if name in sys.modules]
        multiprocessing.set_forkserver_preload(self.preloaded or slow)
        return multiprocessing.get_context(self.start_method)


PROCESS_DEFAULTS = ProcessDefaults()


class RankError(RuntimeError):
    """A rank has raised an error, or ended without an answer. The text says which one, and why."""


class RankOptions(NamedTuple):
    """How a rank starts and ends."""

    variables: dict[str, str]  # variables of the environment
    backend: str | None = "gloo"  # None: the function joins the process group
    device: str = "cpu"
    quiet: bool = False  # hide what the rank writes to stderr; an error still arrives
    keep_alive: bool = False  # until the rank is killed: others would notice its exit


class RankProcess(NamedTuple):
    process: BaseProcess
    answer: Connection

    def how_it_ended(self) -> str:
        code = self.process.exitcode or 0
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class RankPool:
    """Ranks that run one function; at the end of the `with`, those that still run are killed."""

    def __init__(
        self, world_size: int, options: RankOptions, function: Callable, args: tuple
    ) -> None:
        context = PROCESS_DEFAULTS.context()
        # The store where the ranks meet. Port 0: the operating system picks a free one.
        self.store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
        self.ranks = []
        self.all_started = context.Event()
        for rank in range(world_size):
            variables = torchrun_variables(rank, world_size, self.store.port)
            variables |= STORE_OF_A_LAUNCHER | options.variables
            receiver, sender = context.Pipe(duplex=False)
            options_of_rank = options._replace(variables=variables)
            arguments = (rank, options_of_rank, self.all_started, sender, function, args)
            process = context.Process(target=run_rank, args=arguments)
            process.start()
            sender.close()
            self.ranks.append(RankProcess(process, receiver))
        self.all_started.set()

    def __enter__(self) -> list[RankProcess]:
        return self.ranks

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
            rank.answer.close()


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    backend: str | None = "gloo",
    device: str = "cpu",
    seconds: float = 3600,
    quiet: bool = False,
    may_die: Collection[int] = (),
) -> list:
    """Return what function(rank, *args) returns on each rank of a process group, in rank order.

    function: defined in a module, so that another process can import it. An error on one rank ends
    all ranks and is raised here as RankError; so does the time limit, after `seconds`.
    may_die: ranks that may end without an answer, which is then None.
    """
    options = RankOptions({}, backend, device, quiet)
    answers: dict[int, Any] = {}
    end = time.monotonic() + seconds
    with RankPool(world_size, options, function, args) as ranks:
        while len(answers) < world_size:
            waiting = {ranks[n].answer: n for n in range(world_size) if n not in answers}
            ready = wait(waiting, max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {list(waiting.values())} did not end in {seconds:g} s")
            for number in [number for answer, number in waiting.items() if answer in ready]:
                answers[number] = answer_of(number, ranks[number], number in may_die)
        for rank in ranks:
            rank.process.join(10)  # the rank leaves the group
    return [answers[number] for number in range(world_size)]


def answer_of(number: int, rank: RankProcess, may_die: bool) -> Any:
    try:
        is_good, answer = pickle.loads(rank.answer.recv_bytes())
    except EOFError:
        if may_die:
            return None
        rank.process.join(10)
        raise RankError(f"rank {number} {rank.how_it_ended()} without an answer") from None
    if not is_good:
        raise RankError(f"rank {number}: {answer}")
    return answer


def watch_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    seconds: float,
    backend: str | None = "gloo",
    variables: dict[str, str] | None = None,
) -> list[str]:
    """Tell what became of each rank: what function(rank, *args) returned, how it ended, or `waits`.

    function returns a text. seconds: how long it has after all ranks have joined.
    """
    options = RankOptions(variables or {}, backend, quiet=True, keep_alive=True)
    with RankPool(world_size, options, function, args) as ranks:
        for rank in ranks:
            rank.answer.recv_bytes()  # the rank has joined
        end = time.monotonic() + seconds
        while not all(rank.answer.poll() for rank in ranks) and time.monotonic() < end:
            time.sleep(0.02)
        return [became_of(rank) for rank in ranks]


def became_of(rank: RankProcess) -> str:
    if not rank.answer.poll():  # neither an answer nor the end of its process
        return "waits"
    try:
        return pickle.loads(rank.answer.recv_bytes())[1]
    except EOFError:
        rank.process.join(10)
        return rank.how_it_ended()


def torchrun_variables(rank: int | str, world_size: int, port: int | str) -> dict[str, str]:
    """Return torchrun's variables for a rank, if all ranks are on this machine."""
    variables = {"RANK": rank, "LOCAL_RANK": rank}
    variables |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in variables.items()}


def run_rank(
    rank: int,
    options: RankOptions,
    all_started: Event,
    answer: Connection,
    function: Callable,
    args: tuple,
) -> None:
    """Join the group, call the function, and answer with what it returns, or with its error."""
    end_with_parent()
    # While the store's thread asks who connects, glibc holds a lock. A rank that is forked just
    # then has that lock, which nobody gives back. So no rank connects before all are started.
    all_started.wait()
    if options.quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ.update(options.variables)
    dist.set_debug_level_from_env()  # torch has read the level before, in the fork server
    torch.set_num_threads(1)  # with more, the ranks would compete for the cores
    try:
        join_group(rank, options)
        if options.keep_alive:
            answer.send_bytes(b"joined")
        result = (True, function(rank, *args))
    except Exception:
        result = (False, traceback.format_exc())
    answer.send_bytes(pickle.dumps(result))  # send() would hand tensors over as shared memory
    if options.keep_alive:
        time.sleep(3600)
    if options.backend and dist.is_initialized():
        dist.destroy_process_group()


def join_group(rank: int, options: RankOptions) -> None:
    gpu = None
    if options.device == "cuda":
        gpu = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
        torch.set_default_device(gpu)
    if options.backend:
        dist.init_process_group(
            options.backend, device_id=gpu if options.backend == "nccl" else None
        )


def end_with_parent() -> None:
    """Make this process end when its parent does.

    Without this, a rank that waits in C++ would outlive a program that is killed.
    """

    def wait_for_the_end() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()


def init_gloo_or_refuse(program: str, why_two: str) -> None:
    """Join the ranks that torchrun has started here; UsageError, which says why, if it is alone."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        command = f"torchrun --standalone --nproc-per-node=2 {program}"
        raise UsageError(f"{why_two}: start two, with {command}")
    # The ranks' messages stay on loopback; torchrun's store, where they meet, listens everywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname()[0] == "Darwin" else "lo")
    dist.init_process_group("gloo")
