"""What survive/train.py costs over stage 05, per step: real runs that take turns.

    python benchmarks/survive.py

Both programs run as a whole, again and again, in the same two ranks of one thread each; only
joining is left out, since the ranks have joined already. The time of a run is the mean of its steps
as its recorder timed them, without the first epoch. It is the mean and not the median, because
only some steps vote. Each round runs both programs once, and stage 05 twice (timing.py).
Writes survive.json under results/.
"""

import random
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest import mock

import torch.distributed as dist

from common.options import Parser, usage_errors_exit
from common.record import Recorder

from stages import program
from timing import (
    ROOT,
    SAME,
    Times,
    add_effort,
    chapter,
    keep,
    most_rounds,
    of_the_slowest,
    provenance,
    summarize,
    table,
)

RANKS, MODEL, BATCH, EPOCHS, ROUNDS = 2, "net", 120, 11, 41
STAGES = {"05": "05", "survive": "survive", SAME: "05"}  # a variant and the program that it runs
start = chapter("03", "ranks").start


def run(stage: str, folder: str, epochs: int) -> float:
    """Train with the main of that program; the mean time of a step, in seconds."""
    module, recorders = program(stage), []
    rank, size = dist.get_rank(), dist.get_world_size()

    def record(*args: Any) -> Recorder:
        recorders.append(Recorder(*args))
        return recorders[-1]

    flags = [f"--model={MODEL}", f"--batch-size={BATCH}", f"--epochs={epochs}", "--device=cpu"]
    flags += [f"--data-dir={ROOT / 'data'}", f"--run-dir={folder}/{stage}"]
    replaced = {"Recorder": record, "read_launcher": lambda: [rank, rank, size, size]}
    replaced |= {"init_distributed": lambda *_: None, "join": lambda *_: dist.HashStore()}
    with (
        mock.patch.dict(vars(module), replaced),
        mock.patch.object(sys, "argv", ["train.py", *flags]),
        redirect_stdout(StringIO()),
    ):
        module.main()
    [recorder] = recorders
    return statistics.fmean(recorder.seconds[recorder.step // epochs :])


def take_turns(rounds: int, folder: str, epochs: int) -> Times:
    """What each rank does: the time of a step of each variant in each round."""
    times: Times = {name: [] for name in STAGES}
    order = random.Random(0)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(list(STAGES), len(STAGES)):
            times[name].append(run(STAGES[name], folder, epochs))
    return of_the_slowest(times)


def main() -> None:
    parser = Parser(__doc__)
    add_effort(parser, "one round of two epochs", "few rounds")
    args = parser.parse_args()
    rounds, epochs = min(ROUNDS, most_rounds(args)), 2 if args.quick else EPOCHS
    where = provenance(world_size=RANKS, threads_a_rank=1)  # before there is load
    with tempfile.TemporaryDirectory() as folder:
        times, _ = start(RANKS, take_turns, rounds, folder, epochs)
    rows = summarize(times)
    print(table(rows))
    settings = {"model": MODEL, "global_batch": BATCH, "rounds": rounds, "epochs": epochs}
    keep(args, "survive", {"provenance": where, **settings, "variants": rows})


if __name__ == "__main__":
    with usage_errors_exit():
        main()
