"""Lets the ranks of a run meet: within a time limit, after a restart, and on shared GPUs.

python beyond/survive/launch.py
"""

import os
import re
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


class LaunchError(ValueError):
    """The ranks cannot meet. The text says what arrived, what was expected and what to type."""


def read_launcher() -> list[int]:
    """Return rank, local rank, world size, local world size: from torchrun, else srun, else alone.

    torchrun sets all four of its names. So one of them is enough to believe it, even inside a step
    of srun, whose tasks are then torchruns and no ranks; and if one is missing, this rank must not
    train alone while others wait for it.
    """
    if any(name in os.environ for name in TORCHRUN):
        names = TORCHRUN
    elif "SLURM_STEP_NUM_TASKS" in os.environ:
        names = SRUN
    else:
        return [0, 0, 1, 1]
    rank, local_rank, world_size, local_world_size = map(read_number, names)
    if rank >= world_size:
        raise LaunchError(f"{names[0]} is {rank}, expected less than {world_size}")
    return [rank, local_rank, world_size, local_world_size]


def read_number(name: str) -> int:
    """Return a whole number in the environment; of SLURM's tasks per node, "2(x3)", the first."""
    value = os.environ.get(name, "not set")
    first = re.split(r"[(,]", value)[0] if name == "SLURM_STEP_TASKS_PER_NODE" else value
    if first.isdecimal():
        return int(first)
    hint = "start with torchrun or srun"
    if name == "MASTER_PORT":
        hint = f"export {name}=29500, or another free port on rank 0's host"
    raise LaunchError(f"{name} is {value}, expected a whole number: {hint}")


def join_process_group(
    device: torch.device, rank: int, world_size: int, local_world_size: int, seconds: int
) -> dist.Store:
    """Join the process group within this time; returns the store where the ranks have met."""
    limit, one_machine = timedelta(seconds=seconds), local_world_size == world_size
    if one_machine:  # gloo need not listen to the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        store = open_store(rank, world_size, limit, one_machine)
        nccl = each_rank_has_a_gpu(store, device, rank, world_size)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            # gloo's ends first: then the watchdog names the missing rank
            timeout=2 * limit if nccl else limit,
            device_id=device if nccl else None,
        )
    except LaunchError:
        raise
    except (RuntimeError, ValueError) as error:  # ValueError: MASTER_ADDR is not set
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"{world_size} ranks did not meet at {where} ({error}): is it rank 0's host, is the "
            "port free and open, did all ranks start, is GLOO_SOCKET_IFNAME a network interface "
            "here? try another MASTER_PORT or --standalone"
        ) from error
    return store


def open_store(rank: int, world_size: int, limit: timedelta, one_machine: bool) -> dist.Store:
    """Return the store of this run: keys and values that all ranks share."""
    if world_size == 1:
        return dist.HashStore()
    if not 0 < (port := read_number("MASTER_PORT")) < 2**16:
        raise LaunchError(f"MASTER_PORT is {port}, expected a free port on rank 0's host")
    require_address(os.environ.get("MASTER_ADDR"))
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
    # torchrun keeps its store when it restarts the ranks (pytorch issue 135712): ignore keys from
    # before the restart. The agents of several machines count restarts independently.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"
    return dist.PrefixStore(restart, store)


def require_address(host: str | None) -> None:
    """Raise LaunchError for a host that nobody knows, of which torch would ask until the limit."""
    try:
        socket.getaddrinfo(host or None, 0)  # None: not set, as torch will say
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: it can be no host's name
        if error.args[0] == socket.EAI_AGAIN:  # the name server is busy, so torch asks again
            return
        why = f"MASTER_ADDR is {host}, which this machine cannot resolve ({error})"
        cure = "name rank 0's host, or on one machine add --local-addr 127.0.0.1 to torchrun"
        raise LaunchError(f"{why}: {cure}") from error


def each_rank_has_a_gpu(
    store: dist.Store, device: torch.device, rank: int, world_size: int
) -> bool:
    """Tell whether each rank has its own GPU; all get the same answer, or the same LaunchError.

    No rank may decide from what it alone sees: of two nodes, one may have fewer GPUs, and nccl on
    one of them would wait for gloo on the other. The numbers of the GPUs do not tell who shares
    one, because SLURM can hide GPUs, and then each rank sees a GPU 0. Their uuids do.
    """
    device_name = "the CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_name = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device {rank}", device_name)
    devices = [store.get(f"device {other}").decode() for other in range(world_size)]
    without = [other for other, name in enumerate(devices) if name == "the CPU"]
    if len(without) == world_size:
        return False
    if without:
        ranks = ", ".join(map(str, without[:4])) + (", ..." if without[4:] else "")
        why = f"{len(without)} of {world_size} ranks have no GPU (rank {ranks}), the others have"
        raise LaunchError(f"{why}: give all nodes GPUs, or all ranks --device cpu")
    gpus = len(set(devices))
    if rank == 0 and gpus < world_size:
        print(f"{world_size} ranks share {gpus} GPUs: gloo, not nccl")
    return gpus == world_size


def join_or_give_up(rank: int, port: int, ranks_that_start: int) -> None:
    """Be one rank of a world of two, as torchrun would start it."""
    names = (*TORCHRUN, "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, 2, 2, port)), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank, _, world_size, local_world_size = read_launcher()
    try:
        join_process_group(torch.device("cpu"), rank, world_size, local_world_size, seconds=3)
        print(f"{ranks_that_start} of 2 ranks start: rank {rank} has joined {dist.get_backend()}")
        dist.barrier()  # every rank must reach this line: else one may leave before the other joins
        dist.destroy_process_group()
    except LaunchError as error:
        print(f"{ranks_that_start} of 2 ranks start: rank {rank} ends with: {error}")


def main() -> None:
    for ranks in (2, 1):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(join_or_give_up, args=(store.port, ranks), nprocs=ranks)


if __name__ == "__main__":
    main()
