"""Start ranks on this machine quickly: torch is imported only once.

    from ranks import run_ranks

    run_ranks(4, function)  # what function() returns on each of four ranks

Chapters, tests and benchmarks use it; `python -m ranks` shows four ranks at work. A chapter that
torchrun starts calls join_on_this_machine instead.
"""

import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.options import UsageError


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    backend: str = "gloo",
    device: str = "cpu",
    seconds: float = 3600,
    quiet: bool = False,
) -> list:
    """What function(*args) returns on each rank of a process group, in the order of the ranks.

    function: defined in a module, so that another process can import it. It returns plain values.
    An error on one rank ends all ranks and is raised here; so does the time limit, after `seconds`.
    quiet: hides what the ranks write to stderr.
    """
    prepare_forkserver()
    # Port 0: the operating system picks a free one.
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    shared = (world_size, store.port, backend, device, quiet, function, args)
    ranks = mp.start_processes(run_rank, shared, world_size, join=False, start_method="forkserver")
    end = time.monotonic() + seconds
    try:
        while not ranks.join(max(0, end - time.monotonic())):  # False: some ranks still run
            if time.monotonic() > end:
                raise TimeoutError(f"not done after {seconds:g} s")
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    for rank in range(world_size):
        if not store.check([f"answer {rank}"]):  # or `get` would wait for it
            raise RuntimeError(f"rank {rank} ended without an answer")
    return [json.loads(store.get(f"answer {rank}")) for rank in range(world_size)]


def join_on_this_machine(program: str, why_two: str) -> None:
    """Join the ranks that torchrun has started here; UsageError, which says why, if it is alone."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        command = f"torchrun --standalone --nproc-per-node=2 {program}"
        raise UsageError(f"{why_two}: start two, with {command}")
    # Their messages stay on loopback; torchrun's store, where they meet, listens everywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname()[0] == "Darwin" else "lo")
    dist.init_process_group("gloo")


def prepare_forkserver() -> None:
    """A forkserver imports slow modules once. A rank is a copy of it and starts in milliseconds."""
    slow = ("torch", "torchvision", "matplotlib.pyplot", "tabulate")
    multiprocessing.set_forkserver_preload([name for name in slow if name in sys.modules])
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # no line per kill


def end_with_parent() -> None:
    """From now on, this process ends when its parent does.

    Without this, a rank that waits in C++ would outlive a program that is killed.
    """

    def wait() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_rank(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    device: str,
    quiet: bool,
    function: Callable,
    args: tuple,
) -> None:
    """What each process does."""
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # `run_ranks` still gets exceptions
    end_with_parent()
    torch.set_num_threads(1)  # or the ranks compete for the cores
    gpu = None
    if device == "cuda":
        gpu = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
        torch.set_default_device(gpu)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gpu = gpu if backend == "nccl" else None  # else nccl would read LOCAL_RANK, if that is set
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=gpu)
    store.set(f"answer {rank}", json.dumps(function(*args)))
    dist.destroy_process_group()


def device_of(backend: str, world_size: int) -> str:
    """The device for a backend; UsageError if it cannot start this many ranks here."""
    if not dist.is_backend_available(backend):
        raise UsageError(f"--backend {backend} is not built into this torch: try --backend gloo")
    if backend == "mpi":
        raise UsageError("--backend mpi is started by mpirun, not from here: try --backend gloo")
    gpus = torch.cuda.device_count()
    if backend == "nccl" and world_size > gpus:
        few = f"--backend nccl needs a GPU for each of {world_size} ranks, here are {gpus}"
        raise UsageError(f"{few}: try --backend gloo")
    return "cuda" if backend == "nccl" else "cpu"


def require_equal(descriptions: list[str]) -> None:
    """Raise UsageError on every rank if the ranks do not give the same descriptions."""
    all_ranks = [descriptions] * dist.get_world_size()
    dist.all_gather_object(all_ranks, descriptions)  # every rank must reach this line
    expected = [*all_ranks[0], "nothing"]
    for rank, given in enumerate(all_ranks):
        for here, there in zip([*given, "nothing"], expected, strict=False):
            if here != there:
                raise UsageError(
                    f"rank {rank} has {here} where rank 0 has {there}: make them the same on "
                    "every rank"
                )


def introduce() -> str:
    """For `python -m ranks`: who this rank is, and one all-reduce."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)  # every rank must reach this line
    return f"rank {dist.get_rank()} of {dist.get_world_size()}; all ranks add up to {total.item()}"
