"""Common failures: each one really happens on two ranks, and then runs again with its cure.

    python 04_ddp_torchrun/failures.py               lists the failures
    python 04_ddp_torchrun/failures.py rank-branch

With TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL before it, torch reports more. Symptoms, causes and
cures: docs/troubleshooting.md
"""

import os
import re
import signal
import tempfile
import textwrap
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from common.options import Parser, UsageError, exit_on

LIMIT = timedelta(seconds=2)  # a waiting rank gives up after it


def join_process_group(rank: int, store: dist.Store) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)


def rank_branch(rank: int, cured: bool, store: dist.Store) -> str:
    """a collective inside `if rank == 0` -> every rank calls it"""
    join_process_group(rank, store)
    if rank == 0 or cured:
        dist.all_reduce(torch.zeros(3))  # as in evaluate: sums of loss, correct, samples
    dist.broadcast(torch.zeros(8), src=0)  # as DDP does with the buffers in the next forward
    return "continues"


def evaluate_wrapped(rank: int, cured: bool, store: dist.Store) -> str:
    """rank 0 evaluates through the DDP wrapper, which broadcasts -> it evaluates the plain model"""
    join_process_group(rank, store)
    model = nn.BatchNorm1d(4)
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(2, 4)).sum().backward()  # a training step
    if rank == 0:
        with torch.no_grad():
            (model if cured else ddp).eval()(torch.ones(2, 4))
    dist.barrier()  # the others wait until rank 0 has evaluated
    return "continues"


def unused_parameter(rank: int, cured: bool, store: dist.Store) -> str:
    """a parameter that forward does not use -> leave it out, or find_unused_parameters=True"""
    join_process_group(rank, store)
    model = nn.Linear(2, 2)
    model.register_module("spare", nn.Linear(2, 2))  # Linear's forward does not use it
    ddp = DistributedDataParallel(model, find_unused_parameters=cured)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    return "two steps"


class Checkpointed(nn.Module):
    """Its activations are not kept for backward, but computed again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(2, 2), use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, inputs, use_reentrant=self.use_reentrant)


def ready_twice(rank: int, cured: bool, store: dist.Store) -> str:
    """DDP cannot look into a reentrant checkpoint -> use_reentrant=False"""
    join_process_group(rank, store)
    ddp = DistributedDataParallel(Checkpointed(not cured), find_unused_parameters=True)
    for _ in range(2):
        ddp(torch.ones(1, 2, requires_grad=True)).sum().backward()
    return "two steps"


def early_step(rank: int, cured: bool, store: dist.Store) -> str:
    """the optimizer steps between a forward and its backward -> step after both backwards"""
    join_process_group(rank, store)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    early_loss, late_loss = ddp(torch.ones(1, 2)).sum(), ddp(torch.zeros(1, 2)).sum()
    early_loss.backward()
    if not cured:
        optimizer.step()
    late_loss.backward()
    optimizer.step()
    return "stepped"


def expanded_buffer(rank: int, cured: bool, store: dist.Store) -> str:
    """the elements of a buffer share memory, and DDP writes them -> make it contiguous"""
    join_process_group(rank, store)
    model = nn.Linear(2, 2)
    mask = torch.ones(1).expand(4)  # four elements, one place in memory
    model.register_buffer("mask", mask.contiguous() if cured else mask)
    DistributedDataParallel(model)(torch.ones(1, 2))
    return "one forward"


def two_writers(rank: int, cured: bool, store: dist.Store) -> str:
    """each node has a local rank 0, and each saves -> only global rank 0 saves"""
    join_process_group(rank, store)
    local_rank = 0  # two nodes with one rank each
    writer = (rank if cured else local_rank) == 0
    if writer:
        torch.save({"rank": rank}, "checkpoint.tmp")
    dist.barrier()  # both have written: sooner or later it happens without a barrier, too
    if writer:
        os.replace("checkpoint.tmp", "checkpoint.pt")
    return "saved" if writer else "did not save"


def module_prefix(rank: int, cured: bool, store: dist.Store) -> str:
    """the names in the wrapper's state_dict begin with module. -> save the plain model's"""
    join_process_group(rank, store)
    model = nn.Linear(2, 2)
    ddp = DistributedDataParallel(model)
    nn.Linear(2, 2).load_state_dict((model if cured else ddp).state_dict())
    return "loaded"


def sharded_weights(rank: int, cured: bool, store: dist.Store) -> str:
    """a whole checkpoint meets sharded parameters -> set_model_state_dict cuts it into shards"""
    join_process_group(rank, store)
    weights, model = nn.Linear(2, 2).state_dict(), nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    full = StateDictOptions(full_state_dict=True)
    if cured:
        set_model_state_dict(model, weights, options=full)
    else:
        model.load_state_dict(weights)
    weights = get_model_state_dict(model, options=full)  # all ranks take part; rank 0 may save it
    return f"loaded, and gathered {len(weights)} tensors"


def no_interface(rank: int, cured: bool, store: dist.Store) -> str:
    """GLOO_SOCKET_IFNAME names no interface of this machine -> use one that `ip -br addr` lists"""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if cured else "eth99"
    join_process_group(rank, store)
    return "joined"


CASES = (
    rank_branch,
    evaluate_wrapped,
    unused_parameter,
    ready_twice,
    early_step,
    expanded_buffer,
    two_writers,
    module_prefix,
    sharded_weights,
    no_interface,
)
FAILURES = {case.__name__.replace("_", "-"): case for case in CASES}


def run_rank(rank: int, port: int, name: str, cured: bool, debug: str, folder: str) -> None:
    """Run one rank. It stays alive to the end, or the other rank would notice its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C++ logs
    os.chdir(folder)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
    dist.set_debug_level_from_env()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        answer = FAILURES[name](rank, cured, store)
    except Exception as error:
        message = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error))  # gloo's file and line
        answer = f"{type(error).__name__}: {' '.join(message.split())}"
    store.set(f"answer {rank}", answer)
    store.wait(["end"])  # the parent kills it here


def run_failure(name: str, cured: bool, debug: str = "OFF", seconds: float = 60) -> list[str]:
    """What each of the two ranks answered within this time, or the signal that ended it."""
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        args = (store.port, name, cured, debug, folder)
        ranks = mp.start_processes(run_rank, args, 2, False, True, "forkserver").processes
        deadline = time.monotonic() + seconds
        while not all(store.check([f"answer {r}"]) or ranks[r].exitcode for r in range(2)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        ends = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
    return [
        f"ended by {signal.Signals(-end).name}"
        if end
        else store.get(f"answer {rank}").decode()
        if store.check([f"answer {rank}"])
        else "waits"
        for rank, end in enumerate(ends)
    ]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("name", nargs="?", choices=list(FAILURES), help="the failure to run")
    name = parser.parse_args().name
    causes_and_cures = {key: str(case.__doc__).split(" -> ") for key, case in FAILURES.items()}
    if name is None:
        for key, (cause, _) in causes_and_cures.items():
            print(f"{key:<16}  {cause}")
        return
    mp.get_context("forkserver").set_forkserver_preload(["torch"])
    debug = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    for cured, title in enumerate(("cause", "cure")):
        print(f"{title}: {causes_and_cures[name][cured]}")
        for rank, answer in enumerate(run_failure(name, bool(cured), debug)):
            print(textwrap.fill(f"  rank {rank}: {answer}", 100, subsequent_indent=" " * 10))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
