"""How near is an all-reduce to the limit of this machine's memory? A table, in a minute.

python -m shm.speed
python -m shm.speed --ranks 3 --calls broadcast send --sizes 4096 1048576

The limit: a rank must hear from another one, which takes a cache line half of its way there and
back, and it must read each number of its own tensor and write it back. Both are measured in C,
the second by all ranks at once, on a tensor that is warm from the time before. A copy is measured
in the same way. The ways take turns, and shm has two turns in each round, so its distance from
itself shows what the machine's other programs have made of it. gloo may use all cores.
"""

import json
import math
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shm import fast
from shm.busy import (
    LoadWatch,
    Ratio,
    away_from_itself,
    busy_line,
    ratio_of,
    usable_cores,
    why_loaded,
    why_unsteady,
)
from shm.cores import pin
from shm.group import SharedMemoryGroup
from shm.work import Completed, Work

SIZES = [4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20]
BYTES_PER_TIME, MAX_CALLS = 2**24, 50  # one time covers as many calls as move so many bytes
BYTES_PER_TIME_IN_C = 2**23
MIN_ROUNDS = 10
PYTHON_ROUNDS = 200
LINE_ROUNDS, LINE_REPEATS = 200, 1000
AGAIN = "shm_again"  # the second turn of shm
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
    if calls > 1:
        call()  # its memory is warm afterwards, whatever ran before
    meet()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def microseconds_in_c(name: str, repeats: int, *arguments: Any) -> float:
    """Return the microseconds of one repeat of a function in fast.c, which has been run before."""
    function = getattr(fast.library(), name)
    function(*arguments, 1)
    return function(*arguments, repeats) / repeats / 1e3


def has_limit(ranks: int, cores: int) -> bool:
    """Can the limit be measured? Not where ranks share a core and so take turns."""
    return 1 < ranks <= cores and bool(fast.library())


def measure_line(group: Any) -> Row | None:
    """Measure how long a cache line takes from the core of rank 0 to that of rank 1 and back."""
    rank, (slot, _) = dist.get_rank(), group.exchange.slots
    rounds = []
    for _ in range(LINE_ROUNDS):
        slot[:8] = 0
        dist.barrier(group)
        if rank < 2:
            exchange = fast.library().exchange_line
            rounds.append(exchange(slot.data_ptr(), rank, LINE_REPEATS) / LINE_REPEATS)
        dist.barrier(group)
    if rank or min(rounds) < 0:
        return None
    low, middle, high = quantiles(rounds[1:], n=4)
    return {"n": len(rounds) - 1, "ns": middle, "ns_quartiles": [low, high]}


def measure_row(
    name: str, size: int, group: Any, seconds: float, cores: list[set[int]], line: Row | None
) -> Row:
    """Measure one row of the table, on each rank. The ways take turns, until the time is over.

    cores: those of this rank, and those of gloo, which has threads of its own, and is slower on a
    single core. line: as measure_line returns it.
    """
    own_cores, all_cores = cores
    call = collective(name, size, dist.get_rank(), dist.get_world_size())
    x, y = torch.ones(size // 4), torch.zeros(size // 4)
    meet = partial(dist.barrier, group)
    repeats = min(MAX_CALLS, max(1, BYTES_PER_TIME // size))
    over_gloo, over_shm = (
        partial(microseconds_per_call, partial(call, each), repeats, meet) for each in (None, group)
    )
    ways = {"gloo": over_gloo, "shm": over_shm, AGAIN: over_shm}
    if name == "all_reduce" and line:
        in_c = max(1, BYTES_PER_TIME_IN_C // size)
        there, here = y.data_ptr(), x.data_ptr()
        a_pass = partial(microseconds_in_c, "read_and_write", in_c, here, size // 4, 0.0)
        a_copy = partial(microseconds_in_c, "copy", in_c, there, here, size)
        # In this order, since the threads of gloo go on for a while and leave its memory in caches
        ways = {"gloo": over_gloo, "pass": a_pass, "shm": over_shm, "copy": a_copy, AGAIN: over_shm}
    times: dict[str, list[float]] = {way: [] for way in ways}
    end, go_on = time.monotonic() + seconds, torch.ones(1)
    while go_on:
        for way, measure in ways.items():
            os.sched_setaffinity(0, all_cores if way == "gloo" else own_cores)
            meet()
            times[way].append(measure())
        go_on.fill_(time.monotonic() < end or len(times["shm"]) <= MIN_ROUNDS)
        dist.broadcast(go_on, 0, group)
    # The first time of each way is left out, because it warms up
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)[:, 1:]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    columns = dict(zip(ways, slowest.tolist(), strict=True))
    if line and "pass" in columns:
        columns["limit"] = [line["ns"] / 2e3 + each for each in columns["pass"]]
    return summary({"call": name, "ranks": dist.get_world_size(), "bytes": size}, columns)


def summary(row: Row, columns: dict[str, list[float]]) -> Row:
    """Return a row with what its rounds show, in microseconds.

    rounds: those of shm and of its second turn, as multiples of the median of the first.
    """
    shm, again = columns["shm"], columns[AGAIN]
    away, middle = away_from_itself(shm, again), median(shm)
    row["n"], row["away_from_itself"] = len(shm), away
    row["unsteady"] = why_unsteady(away, quantiles(shm, n=4))
    for way, column in columns.items():
        low, middle_of_way, high = quantiles(column, n=4)
        row |= {f"{way}_us": middle_of_way, f"{way}_us_quartiles": [low, high]}
    row["times_gloo"] = ratio_of(columns["gloo"], shm).widened(away)
    if "limit" in columns:
        row["of_the_limit"] = ratio_of(columns["limit"], shm).widened(away)
    row["rounds"] = [[each / middle for each in column] for column in (shm, again)]
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
    cores = [os.sched_getaffinity(0), all_cores]
    python, rows = measure_python(), []
    line = measure_line(group) if has_limit(args.ranks, len(all_cores)) else None
    line = from_rank_0(line)
    for name in args.calls:
        for size in args.sizes:
            seconds = args.seconds / len(args.calls) / len(args.sizes)
            rows.append(measure_row(name, size, group, seconds, cores, line))
    if rank == 0:
        results.write_text(json.dumps({"line": line, "python": python, "rows": rows}))
    dist.destroy_process_group()


def from_rank_0(value: Any) -> Any:
    """Return, on every rank, what rank 0 has."""
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


COLUMNS: dict[str, Callable[[Row], str]] = {
    "call": lambda row: row["call"],
    "ranks": lambda row: str(row["ranks"]),
    "size": lambda row: size_text(row["bytes"]),
    "n": lambda row: str(row["n"]),
    "limit, µs": lambda row: microseconds(row.get("limit_us")),
    "copy, µs": lambda row: microseconds(row.get("copy_us")),
    "gloo, µs": lambda row: microseconds(row["gloo_us"]),
    "shm, µs": lambda row: microseconds(row["shm_us"]),
    "its quartiles": lambda row: " to ".join(map(microseconds, row["shm_us_quartiles"])),
    "gloo / shm": lambda row: ratio_text(row, "times_gloo", ".1f"),
    "of the limit": lambda row: ratio_text(row, "of_the_limit", ".2f"),
}
WIDTHS = (14, 5, 7, 5, 9, 9, 9, 9, 20, 20, 20)


def ratio_text(row: Row, name: str, form: str) -> str:
    """Return a ratio with its interval; "?" if this row's rounds vary too much to tell it."""
    if name not in row:
        return ""
    if row["unsteady"]:
        return "?"
    ratio = Ratio(*row[name])
    ends = {f"{each:{form}}" for each in ratio}
    return ends.pop() if len(ends) == 1 else ratio.text(form)


def size_text(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def microseconds(value: float | None) -> str:
    """Return three digits, or all before the point; nothing if there is no value."""
    if value is None:
        return ""
    return f"{value:,.{max(0, min(2, 2 - math.floor(math.log10(value))))}f}"


def table_line(row: Row | None = None) -> str:
    cells = [text_of(row) if row else head for head, text_of in COLUMNS.items()]
    return f"| {' | '.join(f'{cell:{width}}' for cell, width in zip(cells, WIDTHS, strict=True))} |"


def line_about_python(rows: list[Row]) -> str:
    parts = [f"{row['us']:.1f} µs ({row['what']})" for row in rows]
    return f"Python's part of an all_reduce: {', '.join(parts)}"


def line_about_limit(line: Row | None, ranks: int) -> str:
    """Say what the limit is, or why none was measured."""
    if ranks > usable_cores():
        return (
            f"{ranks} ranks take turns on {usable_cores()} cores, so there is no limit to measure"
        )
    if not fast.library():
        return "Without a compiler, no limit is measured"
    if line is None:
        return "The ranks have not come together, so no limit was measured"
    ends = " to ".join(f"{each:.0f}" for each in line["ns_quartiles"])
    what = f"{line['ns']:.0f} ns (quartiles {ends}, n = {line['n']})"
    return f"A cache line goes from core to core and back in {what}: half of it is in the limit"


def report(results: Row, ranks: int) -> str:
    """Return the table, below a line that says so if the machine was too busy for it."""
    lines = [f"{busy_line(results['busy'])}\n"] if results["busy"] else []
    load = results["load"]
    others = f", {load['other_cores']} used by others meanwhile" if "other_cores" in load else ""
    cores = f"{load['cores']} cores{others}, load {load['load_before']} before"
    lines += [f"{cores}, torch {torch.__version__}", line_about_limit(results["line"], ranks), ""]
    lines += [table_line(), "| --- " * len(COLUMNS) + "|", *map(table_line, results["rows"])]
    return "\n".join([*lines, "", line_about_python(results["python"])])


def with_load(results: Row, watch: LoadWatch) -> Row:
    """Add the load, and why the machine was too busy: by it, or by shm's distance from itself."""
    rounds = [row.pop("rounds") for row in results["rows"]]
    first, again = (list(chain.from_iterable(turns)) for turns in zip(*rounds, strict=True))
    load, steady = watch.load(), (1, 1, 1)  # each row says itself how much its rounds vary
    busy = why_loaded(load) + why_unsteady(away_from_itself(first, again), steady)
    return {"load": load, "busy": busy, **results}


def main() -> None:
    parser = ArgumentParser("python -m shm.speed", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", nargs="+", default=["all_reduce"], metavar="CALL")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    parser.add_argument("--seconds", type=float, default=50, help="of measuring, together")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file, too")
    args = parser.parse_args()
    watch = LoadWatch()
    print(f"measuring for about {args.seconds:.0f} s", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        store, path = f"{folder}/store", Path(folder, "results.json")
        torch.multiprocessing.spawn(run_rank, (args, store, path), nprocs=args.ranks)
        results = with_load(json.loads(path.read_text()), watch)
    if args.out:
        args.out.write_text(json.dumps(results))
    print(report(results, args.ranks))


if __name__ == "__main__":
    main()
