"""How long does a step of some ranks take, and how many messages do they send? For notebook 01."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure.timing import interleave_steps, ratio_to
from benchmarks.measure.training_step import build, step_on_copy
from local_ranks.ranks import run_ranks
from local_ranks.train_stage import load_stage

ALONE, BY_HAND, DDP = "never talk", "03 by hand", "04 DDP"


class Steps(NamedTuple):
    """Seconds of a step in each round, and its gradient messages, by how the ranks average."""

    seconds: dict[str, list[float]]
    messages: dict[str, int]

    def share(self, way: str) -> float:
        """Tell which share of the ceiling's speed this way reaches, both in their best round.

        On a busy machine the other rounds tell more of what else it does.
        """
        return min(self.seconds[ALONE]) / min(self.seconds[way])

    def interval(self, way: str) -> tuple[float, float]:
        """Tell between what the share of the ceiling lies, by the rounds: the 95 % interval."""
        _, (low, high) = ratio_to(self.seconds[way], self.seconds[ALONE])
        return low, high

    def __str__(self) -> str:
        rows = [
            (way, f"{1000 * min(times):.1f}", f"{self.share(way):.0%}", self.messages[way])
            for way, times in self.seconds.items()
        ]
        heads = ("", "ms a step", "of the ceiling", "messages")
        return tabulate(rows, heads, disable_numparse=True, colalign=("left", *3 * ["right"]))


def count_messages(step: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(e.count for e in profiler.key_averages() if e.key == "c10d::allreduce_")


def take_steps(rank: int, model_name: str, batch: int, rounds: int) -> Steps:
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
    times = interleave_steps(steps, rounds)
    seconds = {name: times[name] for name in steps}
    return Steps(seconds, {name: count_messages(step) for name, step in steps.items()})


def measure(model: str = "net-bn", batch: int = 120, ranks: int = 2, rounds: int = 15) -> Steps:
    """Let ranks of this machine take steps in three ways, in turns; batch: the global batch."""
    first, *_ = run_ranks(ranks, take_steps, model, batch, rounds, quiet=True)
    return first


def change(before: tuple[float, float], after: tuple[float, float]) -> str | None:
    """Say whether a share rises or falls, or None if the intervals overlap."""
    if after[0] > before[1]:
        return "rises"
    return "falls" if after[1] < before[0] else None
