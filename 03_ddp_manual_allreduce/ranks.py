"""Start ranks for the chapters of this stage, quickly: torch is imported once, not by every rank.

python 03_ddp_manual_allreduce/ranks.py
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def enter(
    rank: int, world_size: int, port: int, answers: Any, function: Callable, args: tuple
) -> None:
    torch.set_num_threads(1)  # or the ranks fight for the cores
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    answers.put((rank, function(*args)))
    dist.destroy_process_group()


def start(world_size: int, function: Callable, *args: Any) -> list:
    """What function(*args) returns on each rank of a gloo group, in the order of the ranks.

    function: of a module, so that another process can find it; what it returns must be plain
    values. An error on one rank ends all and is raised here.
    """
    # A forkserver imports this program once. Every rank is then a copy of it, in milliseconds.
    multiprocessing.set_forkserver_preload(["__main__"])
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    answers = multiprocessing.get_context("forkserver").SimpleQueue()
    shared = (world_size, store.port, answers, function, args)
    mp.start_processes(enter, shared, world_size, start_method="forkserver")
    return [value for _, value in sorted(answers.get() for _ in range(world_size))]


def introduce() -> str:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)  # every rank must reach this line
    return f"rank {dist.get_rank()} of {dist.get_world_size()}; all ranks add up to {total.item()}"


if __name__ == "__main__":
    print(*start(4, introduce), sep="\n")
