"""What ranks can say to each other: point-to-point messages and collectives, one function each.

    python 03_ddp_manual_allreduce/collectives.py --world-size 4

Rank r holds 10^r, so the place of a digit tells from which rank it came. Where a rank needs a
number for each rank, it holds 1, 2, 3, ... times 10^r: there the digit tells for which rank it is.
`--matrix` tries what each backend can do on this machine. A collective is a call that
all ranks make, in the same order, with tensors of the same shape and dtype; traps.py shows what
happens if they do not.
"""

import re
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor

from common.options import Parser, exit_on_usage_error, float_at_least, int_at_least
from ranks import device_of, start


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
    places = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, places if dist.get_rank() == 0 else None, dst=0)  # only dst gives a list
    return torch.cat(places) if dist.get_rank() == 0 else tensor.new_empty(0)


def all_gather(tensor: Tensor) -> Tensor:
    """Every rank gets the tensors of all ranks, in the order of the ranks."""
    gathered = tensor.new_empty(dist.get_world_size() * len(tensor))
    dist.all_gather_into_tensor(gathered, tensor)  # dist.all_gather fills a list of tensors instead
    return gathered


def scatter(row: Tensor) -> Tensor:
    """Rank 0 sends the r-th part of its row to rank r."""
    part, parts = row.new_empty(1), list(row.chunk(dist.get_world_size()))
    dist.scatter(part, parts if dist.get_rank() == 0 else None, src=0)  # only src gives a list
    return part


def reduce_scatter(row: Tensor) -> Tensor:
    """Rank r gets the r-th part of the sum of all rows."""
    part = row.new_empty(1)
    dist.reduce_scatter_tensor(part, row)  # followed by an all_gather, it is an all_reduce
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


ROW = (scatter, reduce_scatter, all_to_all)  # these need one number for each rank
ONE = (send_recv, isend_irecv, broadcast, reduce, all_reduce, gather, all_gather)
LESSONS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (*ONE, *ROW, barrier)}


def before_and_after(name: str) -> tuple[list[int], list[int]]:
    """What this rank holds before and after the lesson."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([10**rank])
    if LESSONS[name] in ROW:
        tensor = tensor * torch.arange(1, world_size + 1)
    before = tensor.tolist()
    if world_size == 1 and name in ("send_recv", "isend_irecv"):
        return before, []  # a rank cannot send to itself
    return before, LESSONS[name](tensor).tolist()


Row = tuple[list[int], list[int], float, float]  # numbers before, after; came at, left at
RANKS = 2  # in each probe of --matrix


def play_all(names: list[str]) -> list[Row]:
    """What this rank holds before and after each lesson, and when."""
    rows = []
    for name in names:
        late = 0.1 * dist.get_rank() * (name == "barrier")  # so rank 0 has to wait
        time.sleep(late)
        came = time.monotonic()  # all processes of a machine have the same clock
        rows.append((*before_and_after(name), came, time.monotonic()))
    return rows


def is_right(name: str, ranks: list[Row]) -> bool:
    """Whether every rank holds the numbers that it should hold after the lesson."""
    before, after, came, left = zip(*ranks, strict=True)
    everything, n = [number for numbers in before for number in numbers], len(ranks)
    columns = [list(column) for column in zip(*before, strict=True)]
    expected = {
        "send_recv": [before[0], before[0], *before[2:]],
        "isend_irecv": [before[rank - 1] for rank in range(n)],
        "broadcast": [before[0]] * n,
        "reduce": [[sum(everything)], *after[1:]],  # the other ranks' numbers mean nothing
        "all_reduce": [[sum(everything)]] * n,
        "gather": [everything] + [[]] * (n - 1),
        "all_gather": [everything] * n,
        "barrier": list(before),
        "scatter": [[number] for number in before[0]],
        "reduce_scatter": [[sum(column)] for column in columns],
        "all_to_all": columns,
    }[name]
    return list(after) == expected and (name != "barrier" or max(came) <= min(left))


def probe(backend: str, device: str, name: str, seconds: float) -> tuple[str, str]:
    """A cell of the table, and the reason if it is not `yes`."""
    if not dist.is_backend_available(backend):
        return "not built", "this torch was built without it"
    if backend == "mpi":
        return "not tried", "mpirun starts it, not this program"
    gpus, needed = torch.cuda.device_count(), RANKS if backend == "nccl" else 1
    if device == "cuda" and gpus < needed:
        return "no device", f"GPUs needed for {RANKS} ranks: {needed}, seen by torch: {gpus}"
    try:
        where = {"backend": backend, "device": device}
        answers = start(RANKS, play_all, [name], **where, seconds=seconds, quiet=True)
    except (mp.ProcessRaisedException, mp.ProcessExitedException, TimeoutError) as error:
        line = re.search(r"^[\w.]*(Error|Exception)\b.*", str(error), re.M)
        return "no", (line[0] if line else str(error))[:100]
    ranks = [rows[0] for rows in answers]
    return ("yes", "") if is_right(name, ranks) else ("no", f"wrong numbers: {ranks}")


def print_matrix(seconds: float) -> None:
    pairs = [(backend, device) for backend in ("gloo", "nccl", "mpi") for device in ("cpu", "cuda")]
    table: list[list[str]] = []
    reasons: dict[tuple[str, ...], list[str]] = {}
    for name in LESSONS:
        cells = [probe(*pair, name, seconds) for pair in pairs]
        table.append([name, *(cell for cell, _ in cells)])
        for pair, (cell, reason) in zip(pairs, cells, strict=True):
            if reason:
                reasons.setdefault((*pair, cell, reason), []).append(name)
    print(tabulate(table, ["", *(f"{backend} {device}" for backend, device in pairs)]))
    print(f"\ntorch {torch.__version__}, GPUs: {torch.cuda.device_count()}")
    for (backend, device, cell, reason), names in reasons.items():
        which = "all" if len(names) == len(LESSONS) else ", ".join(names)
        print(f"{backend} {device}: {cell}: {which}: {reason}")


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    # 10^18 is the largest power of ten that fits into 64 bits.
    add("--world-size", default=4, type=int_at_least(1, 19), metavar="N", help="processes to start")
    add("--backend", default="gloo", choices=("gloo", "nccl", "mpi"), help="library to use")
    add("--matrix", action="store_true", help="probe what each backend can do here")
    text = "time limit of each probe of --matrix"
    add("--seconds", default=20, type=float_at_least(0.1), metavar="S", help=text)
    args = parser.parse_args()
    if args.matrix:
        return print_matrix(args.seconds)
    device = device_of(args.backend, args.world_size)
    nothing = "-" if args.world_size > 1 else "no other rank"
    where, n = {"backend": args.backend, "device": device}, args.world_size
    answers, table = start(n, play_all, list(LESSONS), **where, quiet=True), []
    for name, *ranks in zip(LESSONS, *answers, strict=True):
        before = [" ".join(map(str, rank[0])) for rank in ranks]
        after = [" ".join(map(str, rank[1])) or nothing for rank in ranks]
        table += [(name, "before", *before), ("", "after", *after)]
    names = (f"rank {rank}" for rank in range(args.world_size))
    print(tabulate(table, ["", "", *names], disable_numparse=True))


if __name__ == "__main__":
    with exit_on_usage_error():
        main()
