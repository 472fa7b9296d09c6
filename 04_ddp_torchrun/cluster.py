"""The same job on a cluster of any size: links by name, nodes of several GPUs, the slowest rank.

python 04_ddp_torchrun/cluster.py
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

from tabulate import tabulate

from alpha_beta import Job, Link, step, two_levels
from common.options import Parser

GBIT, GOOD = 1e9 / 8, 0.9  # bytes per second; an efficiency that needs no advice
# alpha: what NCCL itself assumes for a ring (src/graph/tuning.cc, hwLat, Simple: NVLink 3.4,
# network 14 microseconds). For TCP we found no figure: 50 is assumed. beta: the nominal rate, one
# way. For NVLink, minus 20 % for the protocol (an author of NCCL in nccl-tests issue 212).
LINKS = {
    "nvlink-h100": Link(3.4e-6, 0.8 * 450e9),
    "nvlink-a100": Link(3.4e-6, 0.8 * 300e9),
    "nvlink-v100": Link(3.4e-6, 0.8 * 150e9),
    "nvlink-p100": Link(3.4e-6, 0.8 * 80e9),
    "pcie-3": Link(5.7e-6, 12e9),  # hwLat there; PCI_BW in NCCL's src/graph/topo.h
    "infiniband-8x400": Link(14e-6, 8 * 400 * GBIT),  # a card for each of 8 GPUs
    "infiniband-200": Link(14e-6, 200 * GBIT),
    "roce-25": Link(14e-6, 25 * GBIT),
    "ethernet-100": Link(50e-6, 100 * GBIT),
    "ethernet-50": Link(50e-6, 50 * GBIT),
    "ethernet-25": Link(50e-6, 25 * GBIT),
    "ethernet-10": Link(50e-6, 10 * GBIT),
}


@dataclass(frozen=True)
class Forecast:
    """A job whose local batch stays the same on any number of GPUs.

    job: one micro-batch on one GPU. inside, between: the links in a node and across nodes. wire:
    bytes sent for each byte of gradients. spread: standard deviation / mean of the ranks'
    computing times. trees: as in two_levels.
    """

    job: Job
    batch: int
    a_node: int
    inside: Link
    between: Link
    accumulate: int = 1
    wire: float = 1.0
    spread: float = 0.0
    trees: bool = True

    def seconds(self, gpus: int) -> float:
        """The time of one step of the optimizer."""
        # All wait for the slowest rank: the expected maximum of n normal values (Blom,
        # Statistical Estimates and Transformed Beta-Variables, 1958).
        place = NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) if gpus > 1 else 0.0
        slower = 1 + self.spread * place
        forward, backward = self.job.forward * slower, self.job.backward * slower
        job = replace(self.job, forward=forward, backward=backward)
        return step(job, lambda size: self.all_reduce(size, gpus), self.accumulate).seconds

    def all_reduce(self, size: float, gpus: int) -> float:
        links = self.inside, self.between
        return two_levels(size * self.wire, gpus, self.a_node, *links, self.trees)

    def rate(self, gpus: int) -> float:
        """Samples per second of all GPUs together."""
        return self.batch * self.accumulate * gpus / self.seconds(gpus)

    def efficiency(self, gpus: int) -> float:
        """The rate, divided by that of as many GPUs that never wait for each other."""
        return self.rate(gpus) / (self.batch * gpus / self.job.seconds)

    def bound(self, gpus: int) -> str:
        """What limits the step: computing, the latency of messages, or their bytes."""
        now, free = self.seconds(gpus), replace(self, wire=0.0)
        links = (replace(link, alpha=0.0) for link in (self.inside, self.between))
        instant = replace(self, inside=next(links), between=next(links))
        gains = {"latency": now - instant.seconds(gpus), "bytes": now - free.seconds(gpus)}
        if now < 1.02 * self.job.seconds * self.accumulate or max(gains.values()) < 0.01 * now:
            return "computing"
        return max(gains, key=gains.__getitem__)

    def remedies(self, gpus: int) -> Iterator[tuple[str, "Forecast", int]]:
        """What would help, the mildest change first: a name, the new forecast, its GPUs."""
        job = self.job
        yield "send bf16 (bf16_compress_hook)", replace(self, wire=self.wire / 2), gpus
        for times in (2, 4, 8, 16):
            count = self.accumulate * times
            yield f"accumulate {count}, with no_sync", replace(self, accumulate=count), gpus
        double = replace(job, forward=2 * job.forward, backward=2 * job.backward)
        yield "a local batch twice as large", replace(self, job=double, batch=2 * self.batch), gpus
        count = 4 * self.accumulate
        both = replace(self, wire=self.wire / 2, accumulate=count)
        yield f"send bf16, and accumulate {count}", both, gpus
        good = [n for n in counts_to(gpus)[:-1] if self.efficiency(n) >= GOOD]
        yield f"fewer ranks: {max(good, default=1)}", self, max(good, default=1)


def counts_to(gpus: int) -> list[int]:
    """1, 2, 4 ... and the last."""
    return [*(2**power for power in range(gpus.bit_length()) if 2**power < gpus), gpus]


def main() -> None:
    rows = [
        (name, f"{1e6 * link.alpha:.1f}", f"{8e-9 * link.beta:,.0f}")
        for name, link in LINKS.items()
    ]
    print(tabulate(rows, ("link", "alpha, us", "beta, Gbit/s"), disable_numparse=True))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
