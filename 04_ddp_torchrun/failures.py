"""Common failures: each one really happens on two ranks, and then runs again with its cure.

    python 04_ddp_torchrun/failures.py               lists the failures
    python 04_ddp_torchrun/failures.py rank-branch

With TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL before it, torch reports more. Symptoms, causes and
cures: docs/troubleshooting.md
"""

import os
import re
import tempfile
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from local_ranks.ranks import watch_ranks

LIMIT = timedelta(seconds=2)  # after this time, a waiting rank gives up


class Failure(NamedTuple):
    """run(rank, cured): what one of two ranks does, and what it says at its end."""

    cause: str
    cure: str
    run: Callable[[int, bool], str]


FAILURES: dict[str, Failure] = {}


def failure(cause: str, cure: str) -> Callable:
    def add(run: Callable[[int, bool], str]) -> Callable[[int, bool], str]:
        FAILURES[run.__name__.replace("_", "-")] = Failure(cause, cure, run)
        return run

    return add


@failure(cause="a collective inside `if rank == 0`", cure="every rank calls it")
def rank_branch(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    if rank == 0 or cured:
        dist.all_reduce(torch.zeros(3))  # as in evaluate: sums of loss, correct, samples
    dist.broadcast(torch.zeros(8), src=0)  # as DDP does with the buffers in the next forward
    return "continues"


@failure(
    cause="rank 0 evaluates through the DDP wrapper, which broadcasts",
    cure="it evaluates the plain model",
)
def evaluate_wrapped(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    model = nn.BatchNorm1d(4)
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(2, 4)).sum().backward()  # a training step
    if rank == 0:
        with torch.no_grad():
            (model if cured else ddp).eval()(torch.ones(2, 4))
    dist.barrier()  # the others wait until rank 0 has evaluated
    return "continues"


@failure(
    cause="rank 0 works for longer than the others may wait",
    cure="they wait in a group of its own, whose time limit is longer",
)
def busy_rank(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    patient: Any = dist.new_group(backend="gloo", timeout=20 * LIMIT)
    if rank == 0:
        time.sleep(2 * LIMIT.total_seconds())  # it tokenizes, compiles, saves or evaluates
    dist.barrier(patient if cured else None)
    return "continues"


@failure(
    cause="a parameter that forward does not use",
    cure="leave it out, or find_unused_parameters=True",
)
def unused_parameter(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    model = nn.Linear(2, 2)
    model.register_module("spare", nn.Linear(2, 2))  # Linear's forward does not use it
    ddp = DistributedDataParallel(model, find_unused_parameters=cured)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    return "two steps"


class Checkpointed(nn.Module):
    """Computes its activations again in backward instead of keeping them."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(2, 2), use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, inputs, use_reentrant=self.use_reentrant)


@failure(cause="DDP cannot look into a reentrant checkpoint", cure="use_reentrant=False")
def ready_twice(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    ddp = DistributedDataParallel(Checkpointed(not cured), find_unused_parameters=True)
    for _ in range(2):
        ddp(torch.ones(1, 2, requires_grad=True)).sum().backward()
    return "two steps"


@failure(
    cause="the optimizer steps between a forward and its backward", cure="step after both backwards"
)
def early_step(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    early_loss, late_loss = ddp(torch.ones(1, 2)).sum(), ddp(torch.zeros(1, 2)).sum()
    early_loss.backward()
    if not cured:
        optimizer.step()
    late_loss.backward()
    optimizer.step()
    return "stepped"


@failure(
    cause="the elements of a buffer share memory, and DDP writes them",
    cure="clone it as contiguous",
)
def expanded_buffer(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    model = nn.Linear(2, 2)
    mask = torch.ones(1).expand(4)  # four elements, one place in memory
    own = mask.clone(memory_format=torch.contiguous_format)
    model.register_buffer("mask", own if cured else mask)
    DistributedDataParallel(model)(torch.ones(1, 2))
    return "one forward"


@failure(cause="each node has a local rank 0, and each saves", cure="only global rank 0 saves")
def two_writers(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    local_rank = 0  # two nodes with one rank each
    writer = (rank if cured else local_rank) == 0
    if writer:
        torch.save({"rank": rank}, "checkpoint.tmp")
    dist.barrier()  # both have written: sooner or later it happens without a barrier, too
    if writer:
        os.replace("checkpoint.tmp", "checkpoint.pt")
    return "saved" if writer else "did not save"


@failure(
    cause="the names in the wrapper's state_dict begin with module.", cure="save the plain model's"
)
def module_prefix(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    model = nn.Linear(2, 2)
    ddp = DistributedDataParallel(model)
    nn.Linear(2, 2).load_state_dict((model if cured else ddp).state_dict())
    return "loaded"


@failure(
    cause="a whole checkpoint meets sharded parameters",
    cure="set_model_state_dict cuts it into shards",
)
def sharded_weights(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    weights, model = nn.Linear(2, 2).state_dict(), nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    full = StateDictOptions(full_state_dict=True)
    if cured:
        set_model_state_dict(model, weights, options=full)
    else:
        model.load_state_dict(weights)
    weights = get_model_state_dict(model, options=full)  # all ranks take part; rank 0 may save it
    return f"loaded, and gathered {len(weights)} tensors"


@failure(
    cause="GLOO_SOCKET_IFNAME names no interface of this machine",
    cure="use one that `ip -br addr` lists",
)
def no_interface(rank: int, cured: bool) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if cured else "eth99"
    dist.init_process_group("gloo", timeout=LIMIT)
    return "joined"


@failure(
    cause="one rank sends a number where another one expects an object",
    cure="all ranks make the same call",
)
def object_size(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    seconds = (
        683885907.2944773  # its eight bytes, read as a whole number, are the size in the error
    )
    if rank == 0 and not cured:
        dist.broadcast(torch.tensor([seconds], dtype=torch.float64), src=0)
        return "sent a number"
    received = [seconds]
    dist.broadcast_object_list(received, src=0)
    return f"has {received[0]}"


def agree(model: nn.Module) -> str:
    """Say whether all ranks have the same weights."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    both = [torch.zeros_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    return f"the weights are {'the same' if torch.equal(*both) else 'others on the other rank'}"


@failure(
    cause="require_backward_grad_sync is set after forward, so it counts for the next one",
    cure="set it before forward",
)
def late_flag(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    model = nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for is_last in (False, True):  # two micro-batches, of which the last one averages
        if cured:
            ddp.require_backward_grad_sync = is_last
        loss = ddp(torch.full((1, 2), rank + 1.0)).sum() / 2
        ddp.require_backward_grad_sync = is_last
        loss.backward()
    optimizer.step()
    return agree(model)


@failure(cause="one rank alone loads the scaler's state", cure="every rank loads it")
def one_scaler(rank: int, cured: bool) -> str:
    dist.init_process_group("gloo", timeout=LIMIT)
    model = nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    saved = torch.amp.GradScaler("cpu", init_scale=256.0).state_dict()
    if rank == 0 or cured:
        scaler.load_state_dict(saved)
    scaler.scale(ddp(torch.ones(1, 2)).sum()).backward()  # averages losses of different scale
    scaler.step(optimizer)  # divides by the rank's own scale
    return agree(model)


def try_failure(rank: int, name: str, cured: bool, folder: str) -> str:
    """Return what this rank says at its end, or its error."""
    os.chdir(folder)
    try:
        return FAILURES[name].run(rank, cured)
    except Exception as error:
        message = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error))  # without gloo's file and line
        return f"{type(error).__name__}: {' '.join(message.split())}"


def run_failure(name: str, cured: bool, debug: str = "OFF", seconds: float = 60) -> list[str]:
    """Return what each of the two ranks answered within this time, or how it ended."""
    variables = {"TORCH_DISTRIBUTED_DEBUG": debug}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, cured, folder)
        return watch_ranks(
            2, try_failure, *arguments, seconds=seconds, backend=None, variables=variables
        )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("name", nargs="?", choices=list(FAILURES), help="the failure to run")
    name = parser.parse_args().name
    if name is None:
        for key, listed in FAILURES.items():
            print(f"{key:<16}  {listed.cause}")
        return
    debug = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    for cured, title in ((False, "cause"), (True, "cure")):
        print(f"{title}: {FAILURES[name].cure if cured else FAILURES[name].cause}")
        for rank, answer in enumerate(run_failure(name, cured, debug)):
            print(textwrap.fill(f"  rank {rank}: {answer}", 100, subsequent_indent=" " * 10))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
