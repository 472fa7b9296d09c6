"""What does a message cost between ranks of this machine? α and β, for notebook 04."""

from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.measure.timing import interleave_steps
from local_ranks.ranks import run_ranks
from step_model import Link


def time_all_reduces(rank: int, sizes: list[int], rounds: int) -> dict[int, float]:
    """Seconds by bytes: the median of the rounds, each of which sends every size once."""
    steps = {str(size): partial(dist.all_reduce, torch.zeros(size // 4)) for size in sizes}
    times = interleave_steps(steps, rounds)
    return {size: median(times[str(size)]) for size in sizes}


def seconds_of_all_reduces(world_size: int, sizes: list[int], rounds: int) -> dict[int, float]:
    first, *_ = run_ranks(world_size, time_all_reduces, sizes, rounds)
    return first


def fit(seconds: dict[int, float], world_size: int) -> Any:
    """The link on which a ring takes these seconds, with the least relative error."""
    messages = 2 * (world_size - 1)
    rows = [(messages / s, messages / world_size * size / s) for size, s in seconds.items()]
    alpha, per_byte = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return Link(max(float(alpha), 0.0), 1 / max(float(per_byte), 1e-15))
