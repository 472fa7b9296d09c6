"""How long does a step of some ranks take, and how many messages do they send? For notebook 01."""

from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure.timing import AA, interleave_steps
from benchmarks.measure.training_step import build, step_on_copy
from local_ranks.ranks import run_ranks
from local_ranks.train_stage import load_stage
from shm.busy import Load, LoadWatch, Ratio, away_from_itself, busy_line, ratio_of, why_busy

ALONE, BY_HAND, DDP = "never talk", "03 by hand", "04 DDP"


class Steps(NamedTuple):
    """Seconds of a step in each round, and its gradient messages, by how the ranks average."""

    seconds: dict[str, list[float]]
    messages: dict[str, int]
    load: Load

    def share(self, way: str) -> Ratio:
        """Tell which share of the ceiling's speed this way reaches, and how far that is sure."""
        ratio = ratio_of(self.seconds[ALONE], self.seconds[way])
        return ratio.widened(away_from_itself(self.seconds[ALONE], self.seconds[AA]))

    def __str__(self) -> str:
        rows = [
            (way, f"{1000 * median(self.seconds[way]):.1f}", self.share(way).text(".0%"), messages)
            for way, messages in self.messages.items()
        ]
        rows[0] = (*rows[0][:2], "", rows[0][3])  # compared with itself
        heads = ("", "ms a step", "of the ceiling", "messages")
        table = tabulate(rows, heads, disable_numparse=True, colalign=("left", *3 * ["right"]))
        reasons = why_busy(self.load, self.seconds[ALONE], self.seconds[AA])
        return f"{busy_line(reasons)}\n\n{table}" if reasons else table


def count_messages(step: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(e.count for e in profiler.key_averages() if e.key == "c10d::allreduce_")


def take_steps(rank: int, model_name: str, batch: int, rounds: int) -> dict[str, Any]:
    model, images = build(model_name)
    images = torch.randn(batch // dist.get_world_size(), *images.shape[1:])
    average_gradients = load_stage("03").average_gradients

    def by_hand(model: torch.nn.Module) -> Any:
        return SimpleNamespace(finish=lambda: average_gradients(model))

    steps = {
        ALONE: step_on_copy(model, images),
        BY_HAND: step_on_copy(model, images, reducer=by_hand),
        DDP: step_on_copy(model, images, DistributedDataParallel),
    }
    seconds = interleave_steps(steps, rounds)
    return {
        "seconds": seconds,
        "messages": {name: count_messages(step) for name, step in steps.items()},
    }


def measure(model: str = "net-bn", batch: int = 120, ranks: int = 2, rounds: int = 15) -> Steps:
    """Let ranks of this machine take steps in three ways, in turns; batch: the global batch."""
    watch = LoadWatch()
    first, *_ = run_ranks(ranks, take_steps, model, batch, rounds, quiet=True)
    return Steps(**first, load=watch.load())


def change(before: Ratio, after: Ratio) -> str | None:
    """Say whether a share rises or falls, or None if the intervals overlap."""
    if after.low > before.high:
        return "rises"
    return "falls" if after.high < before.low else None
