"""A step of DDP on paper: computing, buckets, all-reduces, and which of them overlap.

    python beyond/forecast/step_model.py

A message of s bytes takes alpha + s / beta: a latency, and a time that grows with its size
(Hockney, Parallel Computing 20, 1994). The rest is counting. Times in seconds, sizes in bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tabulate import tabulate

from common.options import Parser


@dataclass(frozen=True)
class Link:
    """A network link.

    alpha: seconds until a short message arrives. beta: bytes per second, one way.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class BucketTime:
    """A bucket of gradients, and when backward fills it.

    ready: the share of backward that is done when the bucket's last gradient is ready.
    """

    size: float
    ready: float


@dataclass(frozen=True)
class Job:
    """The seconds that one GPU computes alone, and what it must send."""

    forward: float
    backward: float
    optimizer: float
    buckets: list[BucketTime]

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class StepForecast:
    """The forecast of one step.

    spans: for each bucket, when it is ready, and when its all-reduce begins and ends.
    """

    seconds: float
    spans: list[tuple[float, float, float]]
    backward_end: float


def ring(size: float, world_size: int, link: Link) -> float:
    """Return the seconds of a ring: 2 (n - 1) messages of 1/n each (Patarasuk and Yuan, 2009)."""
    return 2 * (world_size - 1) * (link.alpha + size / world_size / link.beta)


def tree(size: float, world_size: int, link: Link) -> float:
    """Up and down a tree, in pieces that follow each other: few latencies, all the bytes twice.

    NCCL got it in 2.4 (Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4").
    """
    return 2 * math.ceil(math.log2(world_size)) * link.alpha + 2 * size / link.beta


def two_levels(
    size: float, gpus: int, gpus_per_node: int, intra_node: Link, inter_node: Link
) -> float:
    """The seconds of an all-reduce: a ring in each node, then across the nodes a ring or a tree.

    inter_node.beta: all network cards of a node together, because its GPUs share them.
    """
    nodes, local = math.ceil(gpus / gpus_per_node), min(gpus, gpus_per_node)
    across = min(ring(size, nodes, inter_node), tree(size, nodes, inter_node))
    return ring(size, local, intra_node) + across


def step(
    job: Job, cost: Callable[[float], float], accumulate: int = 1, slowdown: float = 0.0
) -> StepForecast:
    """One step of the optimizer. cost(bytes): the seconds of an all-reduce.

    accumulate: micro-batches, all but the last one inside no_sync(). slowdown: the share of its
    speed that computing loses while a message travels; 0 on GPUs, more where both need the cores.
    """
    silent = (accumulate - 1) * (job.forward + job.backward)
    now, done = silent + job.forward, 0.0  # done: seconds of backward
    free, spans = now, []  # free: when the link will be free
    for bucket in job.buckets:
        left = bucket.ready * job.backward - done
        if slowdown:  # while earlier buckets travel, backward is slower
            needed = left / (1 - slowdown) if slowdown < 1 else math.inf
            slow_seconds = max(0.0, min(free - now, needed))
            now, left = now + slow_seconds, left - slow_seconds * (1 - slowdown)
        now, done = now + max(0.0, left), max(done, bucket.ready * job.backward)
        begin = max(now, free)  # all-reduces go one after the other
        free = begin + cost(bucket.size)
        spans.append((now, begin, free))
    return StepForecast(max(now, free) + job.optimizer, spans, now)


def main() -> None:
    late = [
        BucketTime(8e6, 0.0),
        BucketTime(30e6, 0.2),
        BucketTime(25e6, 0.5),
        BucketTime(25e6, 0.9),
    ]
    job = Job(0.100, 0.200, 0.010, [*late, BucketTime(10e6, 1.0)])
    for gbit in (25, 5):
        one_step = step(job, partial(ring, world_size=8, link=Link(50e-6, gbit * 1e9 / 8)))
        rows = [
            (f"{bucket.size / 1e6:.0f}", *(f"{1000 * at:.0f}" for at in span))
            for bucket, span in zip(job.buckets, one_step.spans, strict=True)
        ]
        print(f"forward 100 ms, backward 200 ms, optimizer 10 ms, 8 GPUs, {gbit} Gbit/s each:\n")
        print(tabulate(rows, ("bucket, MB", "ready, ms", "begins", "ends"), disable_numparse=True))
        print(f"\nthe step takes {1000 * one_step.seconds:.0f} ms\n")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
