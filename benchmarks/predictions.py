"""From what is measured apart from DDP to the time of its steps; scaling.py measures.

    python benchmarks/predictions.py

It prints the predictions that are committed, each beside its measurement.
"""

import statistics
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from tabulate import tabulate

from common.options import Parser

from bench import committed
from timing import SAME, Times, chapter

paper, fill = chapter("04", "alpha_beta"), chapter("04", "ready").fill

ALONE, WORK, AFTER, LONG, BESIDE, COPY = "alone", "work", "work, then", "long", "beside", "copy"
TIMES, MEANWHILE, COPIED = 8, 2**23, 2**24  # long work is so much; bytes beside it; bytes copied
HOW = {"DDP": (1, 1.0), "DDP, 4 with no_sync": (4, 1.0), "DDP, bf16 hook": (1, 0.5)}


def reduces(times: Times) -> dict[int, float]:
    """Seconds of an all-reduce, by its bytes: work and then the all-reduce, less the work.

    Ranks come to it from computing, as they do in a step: not all at once, and with busy cores.
    """
    found = {}
    for name, seconds in times.items():
        if name.startswith(AFTER):
            more = [both - work for both, work in zip(seconds, times[WORK], strict=True)]
            found[int(name.removeprefix(AFTER))] = max(median(more), 1e-6)
    return found


def fit(ranks: int, times: Times) -> Any:
    """The link whose ring takes what the all-reduces took, with the least relative error."""
    if ranks == 1:
        return paper.Link(0.0, 1e15)
    found = reduces(times)
    sizes, seconds = np.array(list(found), float), np.array(list(found.values()))
    columns = [np.full(len(sizes), 2.0 * (ranks - 1)), 2 * (ranks - 1) / ranks * sizes]
    # What is smaller than the scatter of the work before it must not count as if it were exact.
    weights = 1 / np.maximum(seconds, 0.1 * median(times[WORK]))
    matrix = np.column_stack(columns) * weights[:, None]
    alpha, per_byte = np.linalg.lstsq(matrix, seconds * weights, rcond=None)[0]
    return paper.Link(max(float(alpha), 0.0), 1 / max(float(per_byte), 1e-15))


def stolen(times: Times) -> float:
    """What a second of communication takes from the computing beside it, from 0 to 1."""
    longer = [beside - work for beside, work in zip(times[BESIDE], times[LONG], strict=True)]
    return min(1.0, max(0.0, median(longer) / reduces(times)[MEANWHILE]))


def predict(times: Times, notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Every step of DDP in these rounds, predicted from what is not DDP, beside its measurement.

    notes: of each rank. A row's times are medians over the rounds; so is its error, which compares
    a round's step with the prediction from that round's computing: a slow minute slows both.
    """
    ranks, alone = len(notes), times[ALONE]
    link, steal = fit(ranks, times), stolen(times)
    handling = statistics.median(times[COPY]) / COPIED  # seconds a byte, in and out of a bucket
    shares = np.mean([note["shares"] for note in notes], axis=0).tolist()
    what = shares, notes[0]["gradients"], handling
    jobs, job = [job_of(seconds, *what) for seconds in alone], job_of(median(alone), *what)
    rows = []
    for how in (name for name in HOW if name in times):
        accumulate, wire = HOW[how]

        def cost(size: float, wire: float = wire) -> float:
            return paper.ring(size * wire, ranks, link)

        found = [paper.step(each, cost, accumulate, steal).seconds for each in jobs]
        errors = [p / m - 1 for p, m in zip(found, times[how], strict=True)]
        rows.append(
            {
                "model": notes[0]["model"],
                "ranks": ranks,
                "how": how,
                "local_batch": notes[0]["local_batch"],
                "rounds": len(alone),
                "alone_ms": milli(median(alone)),
                "measured_ms": milli(median(times[how])),
                "measured_ms_quartiles": quartiles(times[how]),
                "predicted_ms": milli(median(found)),
                "error": round(median(errors), 4),
            }
        )
    return {
        "ranks": ranks,
        "alpha_us": round(1e6 * link.alpha, 1),
        "beta_bytes_per_second": round(link.beta),
        "stolen": round(steal, 3),
        "copied_bytes_per_second": round(1 / handling),
        "all_reduce_ms": {str(size): milli(seconds) for size, seconds in reduces(times).items()},
        "parts_ms": [milli(x) for x in (job.forward, job.backward, job.optimizer)],
        "buckets": [[bucket.size, round(bucket.ready, 4)] for bucket in job.buckets],
        "alone_again": round(median([b / a for a, b in zip(alone, times[SAME], strict=True)]), 4),
        "rows": rows,
    }


def job_of(seconds: float, shares: list[float], gradients: list[int], handling: float) -> Any:
    """The computing of one rank, from the shares that Alone has noted."""
    forward, backward, *ready = shares
    order = sorted(zip(gradients, ready, strict=True), key=lambda gradient: gradient[1])
    each = handling * sum(gradients) / 2  # backward fills the buckets; in the end they are emptied
    rest = (1 - forward - backward) * seconds + each
    return paper.Job(forward * seconds, backward * seconds + each, rest, fill(order))


def milli(seconds: float) -> float:
    return round(1000 * seconds, 3)


def quartiles(seconds: list[float]) -> list[float]:
    if len(seconds) < 2:
        return [milli(seconds[0])] * 2
    return [milli(quartile) for quartile in statistics.quantiles(seconds, n=4)[::2]]


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """All predictions with their measurements; `link` says over what."""
    rows = [{"link": "one machine", **row} for part in results["machine"] for row in part["rows"]]
    for name, part in results["links"].items():
        rows += [{"link": name, **row} for row in part["rows"]]
    return rows


def errors_of(machine: list[dict[str, Any]], links: dict[str, Any]) -> dict[str, float]:
    errors = [abs(row["error"]) for row in rows_of({"machine": machine, "links": links})]
    return {
        "median_error": round(statistics.median(errors), 4),
        "largest_error": round(max(errors), 4),
        "predictions": len(errors),
    }


HEADS = ("link", "ranks", "model", "step", "alone, ms", "predicted", "measured", "error")


def cells(results: dict[str, Any]) -> list[tuple[Any, ...]]:
    """A row for each prediction, for people; `HEADS` are above them."""
    return [
        (
            row["link"],
            row["ranks"],
            row["model"],
            row["how"],
            *(f"{row[key]:.1f}" for key in ("alone_ms", "predicted_ms", "measured_ms")),
            f"{row['error']:+.1%}",
        )
        for row in rows_of(results)
    ]


def table(results: dict[str, Any]) -> str:
    return tabulate(cells(results), HEADS, disable_numparse=True)


COLOURS = {"net": "#0072B2", "mlp": "#E69F00", "resnet18": "#009E73"}  # Okabe and Ito
MARKS = {"net": "o", "mlp": "s", "resnet18": "^"}


def draw(results: dict[str, Any], axes: list[Axes]) -> None:
    """Left, steps by the number of ranks; right, the error of every prediction."""
    by_ranks, errors = axes
    for name in COLOURS:
        rows = [r for part in results["machine"] for r in part["rows"] if r["model"] == name]
        if not rows:
            continue
        ranks = [r["ranks"] for r in rows]
        style: Any = {"color": COLOURS[name], "marker": MARKS[name]}
        low, high = zip(*(row["measured_ms_quartiles"] for row in rows), strict=True)
        by_ranks.vlines(ranks, low, high, color=COLOURS[name])
        by_ranks.plot(
            ranks, [r["measured_ms"] for r in rows], ls="", label=f"{name}, measured", **style
        )
        by_ranks.plot(
            ranks,
            [r["predicted_ms"] for r in rows],
            ls="--",
            mfc="white",
            label="predicted",
            **style,
        )
    by_ranks.set(
        title="A step of DDP", xlabel="ranks", ylabel="ms", yscale="log", xticks=[1, 2, 3, 4]
    )
    below: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 3}
    by_ranks.legend(fontsize="small", **below)
    rows = rows_of(results)
    for name in COLOURS:
        points = [(i, 100 * r["error"]) for i, r in enumerate(rows) if r["model"] == name]
        if points:
            errors.plot(
                *zip(*points, strict=True),
                color=COLOURS[name],
                marker=MARKS[name],
                ls="",
                label=name,
            )
    errors.axhspan(-10, 10, color="#999999", alpha=0.2, label="within 10 %")
    errors.axhline(0, color="black", linewidth=0.8)
    errors.set_xticks(range(len(rows)), [tick(row) for row in rows], rotation=90, fontsize="small")
    errors.set(title="Error of each prediction", ylabel="predicted / measured − 1, %")
    errors.legend(fontsize="small")


def draw_both(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    draw(results, list(axes))
    where = results["provenance"]
    figure.suptitle(f"{where['hardware']}, torch {where['torch']}; one thread a rank, gloo")
    figure.savefig(path, dpi=110)


def tick(row: dict[str, Any]) -> str:
    if row["link"] == "one machine":
        return f"{row['ranks']} ranks" if row["ranks"] > 1 else "1 rank"
    return f"{row['link']}, {row['how'].removeprefix('DDP, ')}"


def main() -> None:
    for machine, content in committed().items():
        if "scaling" in content:
            print(f"{machine}\n\n{table(content['scaling'])}\n")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
