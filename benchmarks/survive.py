"""What survive/train.py costs over stage 05, per step: real runs that take turns.

    python benchmarks/survive.py

Both programs run as a whole, again and again, in the same two ranks of one thread each. Only
joining is left out, since the ranks have joined already. The time of a run is the mean of its steps
as its recorder timed them, without the first epoch. It is the mean and not the median because only
some steps vote. A round runs stage 05, survive, and stage 05 again, in a random order (timing.py).
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

import timing
from stages import program

RANKS, MODEL, BATCH, EPOCHS, ROUNDS = 2, "net", 120, 11, 41
PROGRAMS = {"05": "05", "survive": "survive", timing.SAME: "05"}
start = timing.chapter("03", "ranks").start


def run(stage: str, name: str, folder: str, epochs: int) -> float:
    """Train with the main of this program; the mean time of a step, in seconds."""
    module, recorders = program(stage), []
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())

    def record(*args: Any) -> Recorder:
        recorders.append(Recorder(*args))
        return recorders[-1]

    flags = [f"--model={MODEL}", f"--batch-size={BATCH}", f"--epochs={epochs}", "--device=cpu"]
    flags += [f"--data-dir={timing.ROOT / 'data'}", f"--run-dir={folder}/{stage}"]
    replaced = {"Recorder": record, "read_launcher": lambda: [rank, rank, size, size]}
    replaced |= {"init_distributed": lambda *_: None, "join": lambda *_: store}
    with (
        mock.patch.dict(vars(module), replaced),
        mock.patch.object(sys, "argv", ["train.py", *flags]),
        redirect_stdout(StringIO()),
    ):
        module.main()
    [recorder] = recorders
    return statistics.fmean(recorder.seconds[recorder.step // epochs :])


def take_turns(rounds: int, folder: str, epochs: int) -> timing.Times:
    """What each rank does: the time of a step of each variant in each round."""
    times: timing.Times = {name: [] for name in PROGRAMS}
    order = random.Random(0)  # the same on every rank
    for turn in range(rounds):
        for name in order.sample(list(PROGRAMS), len(PROGRAMS)):
            times[name].append(run(PROGRAMS[name], f"{turn} {name}", folder, epochs))
    return timing.of_the_slowest(times)


def main() -> None:
    parser = Parser(__doc__)
    timing.add_effort(parser, "one round of two epochs", "few rounds")
    args = parser.parse_args()
    rounds, epochs = min(ROUNDS, timing.most_rounds(args)), 2 if args.quick else EPOCHS
    where = timing.provenance(world_size=RANKS, threads_a_rank=1)  # before there is load
    with tempfile.TemporaryDirectory() as folder:
        times, _ = start(RANKS, take_turns, rounds, folder, epochs)
    rows = timing.summarize(times)
    print(timing.table(rows))
    settings = {"model": MODEL, "global_batch": BATCH, "rounds": rounds, "epochs": epochs}
    timing.keep(args, "survive", {"provenance": where, **settings, "variants": rows})


if __name__ == "__main__":
    with usage_errors_exit():
        main()
