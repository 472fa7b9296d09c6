"""What happens with gloo if shapes, order or calls differ between ranks?

    python 03_ddp_manual_allreduce/traps.py

Rank r holds 10^r three times. Each trap runs twice, in two processes of its own: once as it is, and
once as if TORCH_DISTRIBUTED_DEBUG=DETAIL were set. With DETAIL, torch compares the calls of the
ranks before each collective, which costs time. Page: collectives.md
"""

from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from collectives import all_reduce, broadcast
from common.options import Parser, UsageError, exit_on, float_at_least
from local_ranks.ranks import watch_ranks


def no_trap(tensor: Tensor, rank: int) -> Tensor:
    return all_reduce(tensor)


def shorter(tensor: Tensor, rank: int) -> Tensor:
    return all_reduce(tensor[: 2 + rank])


def too_little(tensor: Tensor, rank: int) -> Tensor:
    return broadcast(tensor[: 2 + rank])


def too_much(tensor: Tensor, rank: int) -> Tensor:
    return broadcast(tensor[: 3 - rank])


def other_shape(tensor: Tensor, rank: int) -> Tensor:
    return all_reduce(torch.arange(6).view((2, 3) if rank == 0 else (3, 2)))  # adds in memory order


def other_call(tensor: Tensor, rank: int) -> Tensor:
    return all_reduce(tensor) if rank == 0 else broadcast(tensor)


def no_call(tensor: Tensor, rank: int) -> Tensor:
    return all_reduce(tensor) if rank == 0 else tensor


def one_only(tensor: Tensor, rank: int) -> Tensor:
    a, b = tensor[:1], 2 * tensor[:1]
    for gradient in (a, b) if rank == 0 else (b,):  # as if rank 1 had no gradient a
        all_reduce(gradient)
    return torch.cat([a, b])


def other_order(tensor: Tensor, rank: int) -> Tensor:
    a, b = tensor[:1], 2 * tensor[:1]
    for gradient in (a, b) if rank == 0 else (b, a):
        all_reduce(gradient)
    return torch.cat([a, b])


def gaps(tensor: Tensor, rank: int) -> Tensor:
    return all_reduce(tensor[::2])  # gloo does not skip the gaps: use .contiguous()


TRAPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "no trap: all_reduce of 3 numbers": no_trap,
    "all_reduce of 2 numbers and of 3": shorter,
    "broadcast of 2 numbers into 3": too_little,
    "broadcast of 3 numbers into 2": too_much,
    "all_reduce of the shapes (2, 3) and (3, 2)": other_shape,
    "all_reduce on rank 0, broadcast on rank 1": other_call,
    "all_reduce on rank 0 only": no_call,
    "all_reduce of a and b, on rank 1 of b only": one_only,
    "all_reduce of a and b, on rank 1 of b and a": other_order,
    "all_reduce of x[::2], of a tensor with gaps": gaps,
}


def run_trap(rank: int, trap: str) -> str:
    """What this rank holds afterwards, or the error."""
    try:
        return str(TRAPS[trap](torch.full((3,), 10**rank), rank).tolist())
    except RuntimeError as error:
        return f"error: {str(error).splitlines()[0]}"


def try_trap(trap: str, debug: str, seconds: float) -> list[str]:
    """What each of the two ranks did, within this time after both have joined."""
    variables = {"TORCH_DISTRIBUTED_DEBUG": debug}
    return watch_ranks(2, run_trap, trap, seconds=seconds, variables=variables)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--seconds",
        default=1,
        type=float_at_least(0.1),
        metavar="S",
        help="seconds after which a rank that has not come back counts as waiting",
    )
    seconds = parser.parse_args().seconds
    table = []
    for trap in TRAPS:
        plain, detail = (try_trap(trap, debug, seconds) for debug in ("OFF", "DETAIL"))
        errors = all(answer.startswith("error: Detected mismatch") for answer in detail)
        with_detail = "error" if errors else "the same" if plain == detail else " | ".join(detail)
        table.append([trap, *plain, with_detail])
    print(tabulate(table, ["", "rank 0", "rank 1", "with DETAIL"], disable_numparse=True))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
