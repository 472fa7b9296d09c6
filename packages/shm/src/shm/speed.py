"""How near is an all-reduce to the limit of this machine's memory? A table, in a minute.

python -m shm.speed
python -m shm.speed --ranks 3 --calls broadcast send --sizes 4096 1048576

The limit is a copy: in the same run, all ranks at once copy a tensor of that size to another one
of their own, as in the benchmark STREAM. No sum over ranks can end before the tensors have been
read and written once, and memory lets that happen no faster than a copy. The ways take turns.
"""

import json
import os
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shm.cores import pin
from shm.group import SharedMemoryGroup
from shm.work import Completed, Work

SIZES = [4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20]
BYTES_PER_TIME, MAX_CALLS = 2**19, 50  # one time covers as many calls as move so many bytes
MIN_ROUNDS = 6
PYTHON_ROUNDS = 200
Row = dict[str, Any]


def collective(name: str, size: int, rank: int, world_size: int) -> Callable[[Any], object]:
    """Return the call of that name as a function of a group. A rank's tensor has `size` bytes."""
    x, y = torch.ones(size // 4), torch.zeros(size // 4)
    ins, outs = list(x.tensor_split(world_size)), list(y.tensor_split(world_size))
    even = min(len(part) for part in ins)
    ins, outs = [part[:even] for part in ins], [part[:even] for part in outs]

    def send(group: dist.ProcessGroup) -> None:
        """Send a message of half the size from rank 0 to rank 1, and another one back."""
        if rank == 0:
            dist.send(x[: size // 8], 1, group)
            dist.recv(y[: size // 8], 1, group)
        elif rank == 1:
            dist.recv(y[: size // 8], 0, group)
            dist.send(x[: size // 8], 0, group)

    is_root = rank == 0
    return {
        "all_reduce": lambda group: dist.all_reduce(x, group=group),
        "broadcast": lambda group: dist.broadcast(x, 0, group=group),
        "all_gather": lambda group: dist.all_gather(outs, ins[rank], group=group),
        "gather": lambda group: dist.gather(ins[rank], outs if is_root else None, 0, group),
        "scatter": lambda group: dist.scatter(outs[rank], ins if is_root else None, 0, group),
        "reduce_scatter": lambda group: dist.reduce_scatter(outs[rank], ins, group=group),
        "all_to_all": lambda group: dist.all_to_all(outs, ins, group=group),
        "send": send,
    }[name]


def microseconds_per_call(
    call: Callable[[], object], calls: int, meet: Callable[[], object]
) -> float:
    """Return the microseconds of one call, from a moment at which all ranks are ready."""
    meet()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def measure_row(
    name: str, size: int, group: Any, seconds: float, cores: dict[str, set[int]]
) -> Row:
    """Measure one row of the table, on each rank. The ways take turns, until the time is over.

    cores: the cores of each way. gloo has threads of its own, and is slower on a single core.
    """
    call = collective(name, size, dist.get_rank(), dist.get_world_size())
    x, y = torch.ones(size // 4), torch.zeros(size // 4)
    ways: dict[str, Callable[[], object]] = {"limit": partial(y.copy_, x)}
    ways |= {"gloo": partial(call, None), "shm": partial(call, group)}
    repeats = min(MAX_CALLS, max(1, BYTES_PER_TIME // size))
    times: dict[str, list[float]] = {way: [] for way in ways}
    end, go_on = time.monotonic() + seconds, torch.ones(1)
    while go_on:
        for way, run in ways.items():
            os.sched_setaffinity(0, cores[way])
            times[way].append(microseconds_per_call(run, repeats, partial(dist.barrier, group)))
        go_on.fill_(time.monotonic() < end or len(times["limit"]) < MIN_ROUNDS)
        dist.broadcast(go_on, 0, group)
    # The first time of each way is left out, because it warms up
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)[:, 1:]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    row: Row = {"call": name, "ranks": dist.get_world_size(), "bytes": size}
    row["n"] = slowest.shape[1]
    for way, column in zip(ways, slowest.tolist(), strict=True):
        low, middle, high = quantiles(column, n=4)
        row |= {f"{way}_us": middle, f"{way}_us_quartiles": [low, high]}
    return row


class GroupWithoutWork(SharedMemoryGroup):
    """A group whose all_reduce does nothing: what is left is the cost of torch itself."""

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        return Completed()


def measure_python() -> list[Row]:
    """Measure what Python costs in a call that waits for nobody and moves few bytes."""
    dist.Backend.register_backend("nothing", GroupWithoutWork, devices=["cpu"])
    x, groups = torch.ones(SIZES[0] // 4), {}
    for text, backend in (("torch alone", "nothing"), ("shm, one rank", "shm")):
        for rank in range(dist.get_world_size()):
            group = dist.new_group([rank], backend=backend)
            if rank == dist.get_rank():
                groups[text] = group
    times: dict[str, list[float]] = {text: [] for text in groups}
    for _ in range(PYTHON_ROUNDS):
        for text, group in groups.items():
            call = partial(dist.all_reduce, x, group=group)
            times[text].append(microseconds_per_call(call, MAX_CALLS, lambda: None))
    rows = []
    for text, column in times.items():
        low, middle, high = quantiles(column[1:], n=4)  # without the first, which warms up
        row = {"what": text, "n": len(column) - 1, "us": middle, "us_quartiles": [low, high]}
        rows.append(row)
    return rows


def run_rank(rank: int, args: Any, store: str, results: Path) -> None:
    torch.set_num_threads(1)
    timeout, all_cores = timedelta(minutes=5), os.sched_getaffinity(0)
    dist.init_process_group("gloo", f"file://{store}", timeout, args.ranks, rank)
    group = dist.new_group(backend="shm")
    pin(rank, args.ranks)
    own_cores = os.sched_getaffinity(0)
    cores = {"limit": own_cores, "gloo": all_cores, "shm": own_cores}
    python, rows = measure_python(), []
    for name in args.calls:
        for size in args.sizes:
            seconds = args.seconds / len(args.calls) / len(args.sizes)
            rows.append(measure_row(name, size, group, seconds, cores))
            if rank == 0:
                print(table_line(rows[-1]), flush=True)
    if rank == 0:
        results.write_text(json.dumps({"python": python, "rows": rows}))
        print(f"\n{line_about_python(python)}")
    dist.destroy_process_group()


COLUMNS: dict[str, Callable[[Row], str]] = {
    "call": lambda row: row["call"],
    "ranks": lambda row: str(row["ranks"]),
    "size": lambda row: size_text(row["bytes"]),
    "limit, µs": lambda row: microseconds(row["limit_us"]),
    "gloo, µs": lambda row: microseconds(row["gloo_us"]),
    "shm, µs": lambda row: microseconds(row["shm_us"]),
    "quartiles": lambda row: " to ".join(map(microseconds, row["shm_us_quartiles"])),
    "gloo / shm": lambda row: f"{row['gloo_us'] / row['shm_us']:.1f}",
    "of the limit": lambda row: f"{row['limit_us'] / row['shm_us']:.2f}",
}


def size_text(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def table_line(row: Row | None = None) -> str:
    cells = [text_of(row) if row else head for head, text_of in COLUMNS.items()]
    widths = (14, 5, 7, 10, 10, 10, 20, 10, 12)
    return f"| {' | '.join(f'{cell:{width}}' for cell, width in zip(cells, widths, strict=True))} |"


def line_about_python(rows: list[Row]) -> str:
    parts = [f"{row['us']:.1f} µs ({row['what']})" for row in rows]
    return f"Python's part of an all_reduce: {', '.join(parts)}"


def main() -> None:
    parser = ArgumentParser("python -m shm.speed", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", nargs="+", default=["all_reduce"], metavar="CALL")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    parser.add_argument("--seconds", type=float, default=50, help="of measuring, together")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file, too")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}\n")
    print(table_line())
    print("| --- " * len(COLUMNS) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store, results = f"{folder}/store", Path(folder, "rows.json")
        torch.multiprocessing.spawn(run_rank, (args, store, results), nprocs=args.ranks)
        if args.out:
            args.out.write_text(results.read_text())


if __name__ == "__main__":
    main()
