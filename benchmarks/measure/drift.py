"""What becomes of two ranks if one line of stage 03 is left out, while the loss falls all the same?

The stage's own program trains twice, with the line and without. At each step, it says what a log
shows, the mean loss of both ranks, and what no log shows, how far their weights are apart.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.measure.sections import section
from benchmarks.measure.timing import Effort
from benchmarks.result_files import Results
from local_ranks.machine import scratch_folder
from local_ranks.ranks import run_ranks
from local_ranks.run_files import Run
from local_ranks.stage_files import Change
from local_ranks.train_stage import ON_CPU, load_stage, run_main

RANKS = 2
LEFT_OUT = "average_gradients(model)"
RUNS: dict[str, tuple[Change, ...]] = {"right": (), "wrong": (("train.py", LEFT_OUT),)}


def distances(rank: int, flags: tuple[str, ...], changes: tuple[Change, ...]) -> list[float]:
    """Train; at each step, the distance of this rank's weights from rank 0's, in their lengths."""
    found: list[float] = []

    def note_distance(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            mine = parameters_to_vector(optimizer.param_groups[0]["params"])
            first = mine.clone()
            dist.broadcast(first, src=0)
            found.append(((mine - first).norm() / first.norm()).item())

    stage = load_stage("03", changes)
    register_optimizer_step_post_hook(note_distance)
    run_main(stage, rank, *flags)
    return found


@section("drift")
def measure_drift(effort: Effort) -> Results:
    """Train stage 03 as its page does, with the averaging and without."""
    epochs = 1 if effort.quick else 10
    results: Results = {"ranks": RANKS, "model": "net", "left_out": LEFT_OUT, "runs": {}}
    for name, changes in RUNS.items():
        folder = scratch_folder()
        flags = (*ON_CPU, f"--run-dir={folder}", f"--epochs={epochs}", f"--world-size={RANKS}")
        *_, last = run_ranks(RANKS, distances, flags, changes, backend=None)
        run = Run(folder, [], "")
        results["runs"][name] = {
            "test_accuracy": round(run.summary["test_accuracy"], 4),
            "loss": [round(line["loss"], 4) for line in run.metrics],
            "distance": [round(distance, 6) for distance in last],
        }
    return results
