"""Processes on this machine: ranks that run a function, or a script as torchrun would start it.

All of them come from a fork server that has imported torch, so that a rank is there at once.

    run_on_ranks(2, function, argument)              # what function(rank, argument) returns
    launch_script("04_ddp_torchrun/train.py", flag)  # exit status and output of each of two ranks
    run_script("01_single_gpu/train.py", flag)       # the same of one process without a launcher

    @on_ranks(2)                                     # the body of the test runs on each of two
    def test_ranks_agree(rank, flag): ...            # `flag` is a fixture or a parameter, as always
"""

import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import Signature, signature
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import common.ranks
from common.chapters import ROOT
from common.ranks import STORE_OF_A_LAUNCHER, run_ranks, torchrun_variables
from helpers.machine import patience, scratch_folder

SECONDS = 60  # more than any rank takes; a hang ends here
PRELOADED = [  # by the fork server
    "PIL.Image",
    "common.checkpoint",
    "common.models",
    "ipykernel.kernelapp",
    "matplotlib.pyplot",
    "pycocotools.cocoeval",
    "prove.watch.observe",
    "prove.prover",
    "pytest",
    "tabulate",
    "tests.helpers.preload",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torchvision",
    "torchvision.transforms.v2",
]

process_context = multiprocessing.get_context("forkserver")
common.ranks.preloaded[:] = PRELOADED  # for chapters that tests run here
process_context.set_forkserver_preload(PRELOADED)


# What a launcher tells a rank


def launcher_variables(port: int | str, ranks: int = 2) -> dict[str, str]:
    """What torchrun tells each rank. {RANK} stands for its number, see `run_script`."""
    return torchrun_variables("{RANK}", ranks, port)


def variables_of_rank(rank: int, variables: dict[str, str]) -> dict[str, str]:
    return {name: value.replace("{RANK}", str(rank)) for name, value in variables.items()}


def store_of_a_launcher(ranks: int) -> tuple[dist.TCPStore, dict[str, str]]:
    """The store where ranks meet, kept by this process as torchrun's agent does, and what the ranks
    are told. The caller holds the store as long as they run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, launcher_variables(store.port, ranks) | STORE_OF_A_LAUNCHER


def use_default_start_method() -> None:
    """For loaders, as in a rank of torchrun; else each rank would have a fork server of its own."""
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)


# Ranks that run a function


def run_on_ranks(world_size: int, function: Callable, *args: Any, may_die: tuple = ()) -> list:
    """What function(rank, *args) returns on each rank; it joins the process group itself."""
    options = {"backend": None, "seconds": patience(SECONDS), "may_die": may_die}
    return run_ranks(world_size, _run_function, function, args, **options)


def _run_function(rank: int, function: Callable, args: tuple) -> Any:
    use_default_start_method()
    return function(rank, *args)


def on_ranks(ranks: int = 0) -> Callable:
    """The body of a test runs on so many ranks of a process group over gloo, in a new folder.
    Without a number, on as many as its argument `ranks` says."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def start(**arguments: Any) -> None:
            body = (test.__module__, test.__name__, arguments)
            run_on_ranks(ranks or arguments["ranks"], _run_body, scratch_folder(), *body)

        _, *others = signature(test).parameters.values()  # pytest gives all of them but `rank`
        start.__signature__ = Signature(others)  # type: ignore[attr-defined]
        start.body = test  # type: ignore[attr-defined]
        return start

    return decorate


def _run_body(rank: int, folder: Path, module: str, test: str, arguments: dict[str, Any]) -> None:
    os.chdir(folder)
    dist.init_process_group("gloo")
    getattr(import_module(module), test).body(rank, **arguments)


def gather_from_ranks(value: Any) -> list:
    """What each rank gives, on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# Ranks that run a script


def fork_ranks() -> None:
    """From now on, this process forks the ranks that it starts, so they need not import torch."""
    spawning = sys.modules["torch.multiprocessing.spawn"]
    start = spawning.start_processes  # type: ignore[attr-defined]

    def by_fork(*args: Any, **more: Any) -> Any:
        return start(*args, **{**more, "start_method": "fork"})

    for place in (torch.multiprocessing, spawning):
        place.start_processes = by_fork  # type: ignore[attr-defined]
    common.ranks.start_method = "fork"
    dist.TCPStore = store_in_another_process  # type: ignore[misc]


def store_in_another_process(*address: Any, is_master: bool = False, **more: Any) -> TCPStore:
    """A TCPStore, but of a master, this process has no thread: another one keeps it.

    The thread asks for the name of each rank that connects, and glibc holds a lock meanwhile. A
    rank that is forked then has that lock, which nobody gives back, and waits for it forever.
    """
    forks_ranks = set(more) - {"port"} == {"wait_for_workers"}  # torchrun's agent says more
    if not is_master or not forks_ranks:
        return TCPStore(*address, is_master=is_master, **more)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=_keep_store, args=(sender, address, more), daemon=True).start()
    sender.close()
    return TCPStore(address[0], receiver.recv(), is_master=False)


def _keep_store(sender: Connection, address: tuple, more: dict[str, Any]) -> None:
    store = TCPStore(*address, is_master=True, **more)
    sender.send(store.port)
    multiprocessing.parent_process().join()  # type: ignore[union-attr]


def prepare_for_script(script: str, flags: Sequence[str], output: str) -> None:
    """Make of this process one that has just started for the script, and prints into this file."""
    torch.set_num_threads(1)  # OMP_NUM_THREADS is read when torch is imported: before this process
    use_default_start_method()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(write_through=False, line_buffering=True)  # a line is written as one
    sys.argv = [script, *flags]
    sys.path[0:0] = [str(Path(script).parent)]


def become_script(
    rank: int, env: dict[str, str], script: str, flags: tuple, cwd: str, output: str
) -> None:
    """Be `python SCRIPT FLAGS`, with the output in a file, and end with its exit status."""
    os.environ.update(env)
    os.chdir(cwd)
    prepare_for_script(script, flags, f"{output}.{rank}")
    fork_ranks()
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_script(
    script: str, *flags: str, ranks=1, env=None, cwd=ROOT, seconds=SECONDS
) -> list[tuple[int, str]]:
    """Run `python SCRIPT FLAGS` as that many processes; exit status and output of each.
    env: what a launcher adds; {RANK} in a value becomes the rank."""
    output = f"{scratch_folder()}/out"
    processes = []
    for rank in range(ranks):
        variables = variables_of_rank(rank, env or {})
        arguments = (rank, variables, str(ROOT / script), flags, str(cwd), output)
        processes.append(process_context.Process(target=become_script, args=arguments))
        processes[-1].start()
    deadline = time.monotonic() + patience(seconds)
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            for other in processes:
                other.kill()
            raise TimeoutError(f"{script} {' '.join(flags)} did not end in {seconds} s")
    return [
        (process.exitcode or 0, Path(f"{output}.{rank}").read_text())
        for rank, process in enumerate(processes)
    ]


def launch_script(script: str, *flags: str, ranks=2, env=None, **how: Any) -> list[tuple[int, str]]:
    """As `run_script`, for ranks that think torchrun has started them. env: more variables."""
    _store, variables = store_of_a_launcher(ranks)
    return run_script(script, *flags, ranks=ranks, env=variables | (env or {}), **how)
