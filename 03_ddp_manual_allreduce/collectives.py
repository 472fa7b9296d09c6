"""What ranks can say to each other: point-to-point messages and collectives, one function each.

    python 03_ddp_manual_allreduce/collectives.py --world-size 4

Rank r holds 10^r, so the place of a digit tells from which rank it came. Where a rank needs a
number for each rank, it holds 1, 2, 3, ... times 10^r: there the digit tells for which rank it is.
A collective is a call that all ranks make, in the same order, with tensors of the same shape and
dtype; collectives.md says what happens if they do not.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from common.options import Parser, UsageError, exit_on, int_at_least
from local_ranks.ranks import run_ranks


def send_recv(tensor: Tensor) -> Tensor:
    """Rank 0 sends to rank 1; the other ranks do nothing."""
    if dist.get_rank() == 0:
        dist.send(tensor, dst=1)  # returns when rank 1 receives
    elif dist.get_rank() == 1:
        dist.recv(tensor, src=0)  # if both ranks sent first, both would wait
    return tensor


def isend_irecv(tensor: Tensor) -> Tensor:
    """Each rank sends to the next one, all at the same time, in a ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    sending = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    receiving = dist.P2POp(dist.irecv, arrived, (rank - 1) % world_size)
    for work in dist.batch_isend_irecv([sending, receiving]):  # neither waits for the other
        work.wait()  # until then, `arrived` may hold anything; do not write to `tensor`
    return arrived


def broadcast(tensor: Tensor) -> Tensor:
    """Every rank gets rank 0's tensor in place of its own."""
    dist.broadcast(tensor, src=0)  # every rank must reach this line, as in all that follow
    return tensor


def reduce(tensor: Tensor) -> Tensor:
    """Rank 0 gets the sum of all ranks' tensors."""
    dist.reduce(tensor, dst=0)  # only dst has the sum; gloo leaves partial sums in the others
    return tensor


def all_reduce(tensor: Tensor) -> Tensor:
    """Every rank gets the sum of all ranks' tensors in place of its own."""
    dist.all_reduce(tensor)  # in place: clone the tensor if you need it afterwards
    return tensor


def gather(tensor: Tensor) -> Tensor:
    """Rank 0 gets the tensors of all ranks, in the order of the ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, parts if dist.get_rank() == 0 else None, dst=0)  # only dst gives a list
    return torch.cat(parts) if dist.get_rank() == 0 else tensor.new_empty(0)


def all_gather(tensor: Tensor) -> Tensor:
    """Every rank gets the tensors of all ranks, in the order of the ranks."""
    places = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(places, tensor)
    return torch.cat(places)


def scatter(row: Tensor) -> Tensor:
    """Rank 0 sends the r-th part of its row to rank r."""
    part, parts = row.new_empty(1), list(row.chunk(dist.get_world_size()))
    dist.scatter(part, parts if dist.get_rank() == 0 else None, src=0)  # only src gives a list
    return part


def reduce_scatter(row: Tensor) -> Tensor:
    """Rank r gets the r-th part of the sum of all rows."""
    part = row.new_empty(1)
    parts = list(row.chunk(dist.get_world_size()))
    dist.reduce_scatter(part, parts)  # followed by an all_gather, it is an all_reduce
    return part


def all_to_all(row: Tensor) -> Tensor:
    """Rank r gets the r-th part of every row: a matrix of rows, transposed."""
    column = torch.empty_like(row)
    dist.all_to_all_single(column, row)  # gloo of torch 2.11 has this, but not all_to_all of lists
    return column


def barrier(tensor: Tensor) -> Tensor:
    """No tensor is sent. No rank continues before all ranks have come."""
    dist.barrier()  # useful if another rank writes a file; the calls above wait by themselves
    return tensor


NEEDS_A_ROW = (scatter, reduce_scatter, all_to_all)  # one number for each rank
NEEDS_A_NUMBER = (send_recv, isend_irecv, broadcast, reduce, all_reduce, gather, all_gather)
LESSONS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (*NEEDS_A_NUMBER, *NEEDS_A_ROW, barrier)
}


def play(rank: int, name: str) -> tuple[list[int], list[int]]:
    """What this rank holds before and after the lesson."""
    world_size = dist.get_world_size()
    tensor = torch.tensor([10**rank])
    if LESSONS[name] in NEEDS_A_ROW:
        tensor = tensor * torch.arange(1, world_size + 1)
    before = tensor.tolist()
    if world_size == 1 and name in ("send_recv", "isend_irecv"):
        return before, []  # a rank cannot send to itself
    return before, LESSONS[name](tensor).tolist()


def play_all(rank: int) -> list[tuple[list[int], list[int]]]:
    """What this rank holds before and after each lesson."""
    return [play(rank, name) for name in LESSONS]


def device_of(backend: str, world_size: int) -> str:
    """The device for a backend; UsageError if it cannot start this many ranks here."""
    if not dist.is_backend_available(backend):
        raise UsageError(f"--backend {backend} is not built into this torch: try --backend gloo")
    gpus = torch.cuda.device_count()
    if backend == "nccl" and world_size > gpus:
        few = f"--backend nccl needs a GPU for each of {world_size} ranks, here are {gpus}"
        raise UsageError(f"{few}: try --backend gloo")
    return "cuda" if backend == "nccl" else "cpu"


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    # At most 9 ranks: the number for a tenth would be 10, which takes the digits of two.
    add("--world-size", default=4, type=int_at_least(1, 10), metavar="N", help="processes to start")
    add("--backend", default="gloo", choices=("gloo", "nccl"), help="library to use")
    args = parser.parse_args()
    device = device_of(args.backend, args.world_size)
    nothing, table = "-" if args.world_size > 1 else "no other rank", []
    answers = run_ranks(args.world_size, play_all, backend=args.backend, device=device, quiet=True)
    for name, *ranks in zip(LESSONS, *answers, strict=True):
        before = [" ".join(map(str, rank[0])) for rank in ranks]
        after = [" ".join(map(str, rank[1])) or nothing for rank in ranks]
        table += [(name, "before", *before), ("", "after", *after)]
    names = (f"rank {rank}" for rank in range(args.world_size))
    print(tabulate(table, ["", "", *names], disable_numparse=True))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
