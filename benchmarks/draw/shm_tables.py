"""The tables of the backend over shared memory, beside gloo and the limit of memory."""

from benchmarks.draw.markdown import column, table_of_columns, table_of_rows
from benchmarks.result_files import Results


def size_text(size: int) -> str:
    return f"{size // 2**10} KiB" if size < 2**20 else f"{size // 2**20} MiB"


def sizes(results: Results) -> str:
    """A line for each size of an all-reduce, beside the copy that it cannot outrun."""
    rows = []
    for row in results["rows"]:
        times_gloo, share = row["gloo_us"] / row["shm_us"], row["limit_us"] / row["shm_us"]
        size = size_text(row["bytes"])
        rows.append({**row, "size": size, "times_gloo": times_gloo, "share": share})
    columns = {
        "size": "{size}",
        "n": "{n}",
        "limit, µs": "{limit_us:,.1f}",
        "gloo, µs": "{gloo_us:,.0f}",
        "shm, µs": "{shm_us:,.1f}",
        "its quartiles": "{shm_us_quartiles[0]:,.1f} to {shm_us_quartiles[1]:,.1f}",
        "gloo / shm": "{times_gloo:.1f}",
        "of the limit": "{share:.2f}",
    }
    return table_of_rows(rows, columns)


def python_calls(results: Results) -> str:
    """What a call costs where nobody waits and hardly a byte moves."""
    columns = {"an all_reduce of 4 KiB": "{what}", "n": "{n}", "µs": "{us:.1f}"}
    columns["its quartiles"] = "{us_quartiles[0]:.1f} to {us_quartiles[1]:.1f}"
    return table_of_rows(results["python"], columns)


def in_place(results: Results) -> str:
    rows = [{**row, "size": size_text(row["bytes"])} for row in results["rows"]]
    columns = {
        "size": "{size}",
        "n": "{n}",
        "limit, µs": "{limit_us:,.1f}",
        "fast.c": "{rows_us:,.1f}",
        "tensors in shared memory": "{shared_tensors_us:,.1f}",
        "process_vm_readv": "{process_vm_readv_us:,.1f}",
    }
    return table_of_rows(rows, columns)


def calls(results: Results) -> str:
    """gloo's time over shm's, of all sizes: the least and the most favorable one."""
    times: dict[str, dict[str, list[float]]] = {}
    for row in results["calls"]:
        of_call = times.setdefault(f"{row['ranks']} ranks", {}).setdefault(row["call"], [])
        of_call.append(row["gloo_us"] / row["shm_us"])
    return table_of_columns({ranks: column(row, extremes) for ranks, row in times.items()})


def extremes(times: list[float]) -> str:
    return f"{min(times):.1f} to {max(times):.0f}"
