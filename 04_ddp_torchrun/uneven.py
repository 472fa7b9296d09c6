"""Ranks with unequal numbers of batches: the hang, and a cure.

    torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/uneven.py

The last rank has one batch more than the others. In its backward it waits for gradients that no
other rank will send. Inside `Join`, a rank without batches answers with zeros. uneven.md names two
more cures.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.options import Parser, UsageError, exit_on, float_at_least
from local_ranks.ranks import init_gloo_or_refuse

BATCHES = 3  # batches of every rank; the last rank has one more


def batches_of(rank: int, world_size: int) -> list[Tensor]:
    """Batches of one sample, (1, 2), of value rank + 1: a gradient shows which ranks took part."""
    samples = torch.full((BATCHES + (rank == world_size - 1), 1, 2), rank + 1.0)
    return list(samples)


def new_ddp(seconds: float) -> tuple[nn.Linear, DistributedDataParallel]:
    """A model of one weight matrix, (1, 2), and its wrapper, in a process group of their own.

    After a time-out, a group is broken: each part needs a new one.
    """
    group = dist.new_group(timeout=timedelta(seconds=seconds))  # every rank must reach this line
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, DistributedDataParallel(model, process_group=group)


def train(model: nn.Linear, ddp: nn.Module, batches: Iterable[Tensor]) -> list[float]:
    """Take one step for each batch. Returns the mean gradient of each completed step."""
    optimizer = SGD(model.parameters(), lr=0.1)
    gradients = []
    for batch in batches:
        optimizer.zero_grad()
        ddp(batch).sum().backward()  # the gradient is the sample: rank + 1
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.mean().item())
        optimizer.step()
    return gradients


def hang(seconds: float) -> str:
    """Return in one line what happens to this rank if the others have fewer batches."""
    model, ddp = new_ddp(seconds)
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    gradients: list[float] = []
    try:
        for batch in batches:
            gradients += train(model, ddp, [batch])
    except RuntimeError as error:
        # "[gloo's file and line] Timed out waiting 2000ms for send operation to complete"
        reason = str(error).rpartition("] ")[2].partition(" for ")[0]
        return f"step {len(gradients) + 1} of {len(batches)}: {reason}"
    return f"done after {len(gradients)} of {len(batches)} steps"


def join(divide_by_initial_world_size: bool, seconds: float = 60) -> tuple[list[float], Tensor]:
    """Return the gradients of this rank's steps, and the weights at the end, (1, 2)."""
    model, ddp = new_ddp(seconds)
    with Join([ddp], divide_by_initial_world_size=divide_by_initial_world_size):
        gradients = train(model, ddp, batches_of(dist.get_rank(), dist.get_world_size()))
    return gradients, model.weight.detach().clone()


def print_from_all(title: str, line: str) -> None:
    """Rank 0 prints every rank's line, in the order of the ranks."""
    lines = [line] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(f"\n{title}")
        for rank, line in enumerate(lines):
            print(f"  rank {rank}: {line}")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--seconds",
        default=2,
        type=float_at_least(0.1),
        metavar="S",
        help="seconds after which a waiting rank gives up",
    )
    seconds = parser.parse_args().seconds
    init_gloo_or_refuse("04_ddp_torchrun/uneven.py", "one rank waits for nobody")
    end = hang(seconds)
    print_from_all(
        f"the last rank has one batch more; a rank that waits gives up after {seconds:g} s", end
    )
    for divide in (True, False):
        gradients, weights = join(divide)
        steps = " ".join(f"{gradient:g}" for gradient in gradients)
        result = f"gradients {steps}; weights {weights.mean():.2f}"
        print_from_all(f"Join, divide_by_initial_world_size={divide}", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
