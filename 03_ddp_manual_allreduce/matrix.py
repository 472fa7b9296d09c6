"""What can each backend do on which device? Tries every call of collectives.py on this machine.

    python 03_ddp_manual_allreduce/matrix.py

The documentation of torch.distributed has such a table. This one is about the torch installed here.
Each cell is a probe in two processes of its own, with a time limit: `yes` if every rank holds the
numbers that it should. A probe that crashes or hangs counts as `no` and does not disturb others.
"""

import re
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate

from collectives import LESSONS, before_and_after
from common.options import Parser, usage_errors_exit
from ranks import start

Row = tuple[list[int], list[int], float, float]  # numbers before, after; came at, left at
RANKS = 2  # in each probe


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


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    with usage_errors_exit():
        print_matrix(seconds=20)
