"""Scripts on ranks of this machine, which think that torchrun has started them.

    run_script("01_single_gpu/train.py", flag)       # exit status and output of one process
    launch_script("04_ddp_torchrun/train.py", flag)  # the same for each of two ranks
    start_script("04_ddp_torchrun/train.py", flag)   # only starts it: benchmarks let several wait

Each process comes from a fork server that has imported torch, and becomes the script.
"""

import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from local_ranks.chapters import ROOT
from local_ranks.machine import (
    SECONDS,
    scratch_folder,
    set_malloc,
    timeout_under_load,
    use_default_start_method,
)
from local_ranks.ranks import (
    PROCESS_DEFAULTS,
    STORE_OF_A_LAUNCHER,
    end_with_parent,
    torchrun_variables,
)


def launcher_variables(port: int | str, world_size: int = 2) -> dict[str, str]:
    """Return torchrun's variables for each rank; {RANK} stands for its number, see `run_script`."""
    return torchrun_variables("{RANK}", world_size, port)


def variables_of_rank(rank: int, variables: dict[str, str]) -> dict[str, str]:
    return {name: value.replace("{RANK}", str(rank)) for name, value in variables.items()}


def store_of_a_launcher(world_size: int) -> tuple[dist.TCPStore, dict[str, str]]:
    """Make the store where ranks meet, as torchrun's agent does, and the variables of the ranks.

    The caller must hold the store as long as the ranks run.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, launcher_variables(store.port, world_size) | STORE_OF_A_LAUNCHER


def fork_ranks() -> None:
    """Make this process fork the ranks that it starts, so that they need not import torch."""
    spawning = sys.modules["torch.multiprocessing.spawn"]
    start = spawning.start_processes

    def by_fork(
        function: Callable, args: tuple, nprocs: int, join: bool, *_: Any, **how: Any
    ) -> Any:
        all_started = multiprocessing.get_context("fork").Event()
        how["start_method"] = "fork"
        processes = start(_run_when, (all_started, function, *args), nprocs, join=False, **how)
        all_started.set()
        while join and not processes.join():
            pass
        return processes

    spawning.start_processes = by_fork  # type: ignore[attr-defined]
    PROCESS_DEFAULTS.start_method = "fork"


def _run_when(rank: int, all_started: Event, function: Callable, *args: Any) -> None:
    all_started.wait()
    function(rank, *args)


def prepare_for_script(script: str, flags: Sequence[str], output: str, threads: int = 1) -> None:
    """Make this process like one that was started for the script and prints into this file."""
    torch.set_num_threads(threads)  # torch has read OMP_NUM_THREADS before, in the fork server
    use_default_start_method()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Each line is written in one piece.
    sys.stdout.reconfigure(write_through=False, line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [script, *flags]
    sys.path[0:0] = [str(Path(script).parent)]


def become_script(
    rank: int,
    env: dict[str, str],
    script: str,
    flags: tuple,
    cwd: str,
    output: str,
    own_group: bool = False,
    forks: bool = True,
) -> None:
    """Run the script as `python SCRIPT FLAGS` would, and end with its exit status."""
    if own_group:
        os.setpgid(0, 0)
        end_with_parent()
    os.environ.update(env)
    set_malloc(env)
    os.chdir(cwd)
    prepare_for_script(script, flags, f"{output}.{rank}", int(env.get("OMP_NUM_THREADS", 1)))
    if forks:
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


def start_script(
    script: str,
    *flags: str,
    output: str,
    processes: int = 1,
    env: dict[str, str] | None = None,
    cwd: str | Path = ROOT,
    own_group: bool = False,
    forks: bool = True,
) -> list[BaseProcess]:
    """Start `python SCRIPT FLAGS` as that many processes, which print into OUTPUT.0, OUTPUT.1 ...

    env: what a launcher adds; {RANK} in a value becomes the rank. own_group: each process, with
    those that it starts, gets signals of its own, and ends when this process does. forks: it forks
    the ranks that it starts, which a process that has looked for GPUs may not do.
    """
    started = []
    for rank in range(processes):
        variables = variables_of_rank(rank, env or {})
        call = (str(ROOT / script), flags, str(cwd), output, own_group, forks)
        arguments = (rank, variables, *call)
        started.append(PROCESS_DEFAULTS.context().Process(target=become_script, args=arguments))
        started[-1].start()
    return started


def run_script(
    script: str,
    *flags: str,
    processes: int = 1,
    env: dict[str, str] | None = None,
    cwd: str | Path = ROOT,
    seconds: float = SECONDS,
) -> list[tuple[int, str]]:
    """Run a script as start_script does; return exit status and output of each process."""
    output = f"{scratch_folder()}/out"
    started = start_script(script, *flags, output=output, processes=processes, env=env, cwd=cwd)
    deadline = time.monotonic() + timeout_under_load(seconds)
    for process in started:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            for other in started:
                other.kill()
            raise TimeoutError(f"{script} {' '.join(flags)} did not end in {seconds} s")
    return [
        (process.exitcode or 0, Path(f"{output}.{rank}").read_text())
        for rank, process in enumerate(started)
    ]


def launch_script(
    script: str, *flags: str, world_size: int = 2, env: dict[str, str] | None = None, **how: Any
) -> list[tuple[int, str]]:
    """Call `run_script` for ranks that think torchrun has started them. env: more variables."""
    _store, variables = store_of_a_launcher(world_size)
    return run_script(script, *flags, processes=world_size, env=variables | (env or {}), **how)
