"""How far are forecasts from what others have measured? Rates of 1 to 8 GPUs, of published.json.

    python beyond/forecast/published.py

Each forecast knows only the rate of one GPU, the size of the model and the name of the link. The
file says where each rate was published. Page: README.md#what-others-have-measured
"""

import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

from common.options import Parser
from forecast import LINKS, Forecast, gradients_of_unknown, one_gpu_job
from gradient_order import gradients_of_classifier

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())

Published = dict[str, Any]  # a job in that file


def published_job(name: str, gpu: str, **other: object) -> Published:
    """Return the only job with these entries."""
    wanted = {"name": name, "gpu": gpu, **other}
    [job] = [job for job in PUBLISHED["jobs"] if wanted.items() <= job.items()]
    return job


def forecast_of(job: Published) -> Forecast:
    """What forecast.py says of a job, from the rate of one GPU."""
    if "parameters" in job:
        gradients = gradients_of_unknown(job["parameters"])
    else:
        gradients = gradients_of_classifier(job["model"], 224)
    seconds = job["batch"] * job.get("units_per_sample", 1) / job["rates"]["1"]
    link = LINKS[job["link"]]  # one machine has all these GPUs, so no message leaves it
    return Forecast(one_gpu_job(seconds, gradients), job["batch"], 8, link, link)


def speedups(job: Published) -> dict[int, float]:
    """How many times the rate of one GPU others have measured, by the number of GPUs."""
    return {int(gpus): rate / job["rates"]["1"] for gpus, rate in job["rates"].items()}


def row(job: Published) -> list[str]:
    measured = speedups(job)
    most = max(measured)
    expected = most * forecast_of(job).efficiency(most)
    source = PUBLISHED["sources"][job["source"]]
    return [
        job["name"],
        job["gpu"],
        job["format"],
        f"{job['batch']:,}",
        f"{job['rates']['1']:,} {job['unit']}",
        *(f"{measured[gpus]:.2f}" if gpus in measured else "" for gpus in (2, 4, 8)),
        f"{expected:.2f}",
        f"{expected / measured[most] - 1:+.1%}",
        f"{source['by']} {source['date'][:4]}",
    ]


def main() -> None:
    Parser(__doc__).parse_args()
    print("Published by others, not measured by us. Several GPUs: times the rate of one.\n")
    heads = ("model", "GPU", "format", "batch", "1 GPU, per s", "2", "4", "8", "forecast", "error")
    rows = [row(job) for job in PUBLISHED["jobs"]]
    align = (*["left"] * 3, *["right"] * 7, "left")
    print(tabulate(rows, (*heads, "source"), colalign=align, disable_numparse=True))


if __name__ == "__main__":
    main()
