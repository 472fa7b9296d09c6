"""How will my job scale? A forecast from one GPU's step, before you rent a cluster.

    python beyond/forecast/forecast.py --model resnet50 --step-ms 45 --gpus 64

Stage 01 measures the step on one GPU of that kind: step_ms in its summary.json. A third of it is
taken for forward, the rest for backward. step_model.py is the model of a step, gradient_order.py
counts layers and buckets, and README.md shows how far to trust it.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import fill

from tabulate import tabulate

from common.options import Parser, UsageError, exit_on, float_at_least, int_at_least
from gradient_order import fill_buckets, gradients_of_classifier
from step_model import Job, Link, step, two_levels

PIECES = 100  # an unknown model has this many equal gradients, ready one after the other
GBIT = 1e9 / 8  # bytes per second
GOOD = 0.9  # an efficiency that needs no advice
# alpha: what NCCL itself assumes for a ring (src/graph/tuning.cc, hwLat, Simple: NVLink 3.4,
# network 14 microseconds). For TCP we found no figure: 50 is assumed. beta: the nominal rate, one
# way. For NVLink, minus 20 % for the protocol (an author of NCCL in nccl-tests issue 212).
LINKS = {
    "nvlink-h100": Link(3.4e-6, 0.8 * 450e9),
    "nvlink-a100": Link(3.4e-6, 0.8 * 300e9),
    "nvlink-v100": Link(3.4e-6, 0.8 * 150e9),
    "pcie-3": Link(5.7e-6, 12e9),  # hwLat there; PCI_BW in NCCL's src/graph/topo.h
    "pcie-4": Link(5.7e-6, 24e9),  # 16 lanes of kvDictPciGen in NCCL's src/graph/topo.cc
    "infiniband-8x400": Link(14e-6, 8 * 400 * GBIT),  # a card for each of 8 GPUs
    "infiniband-200": Link(14e-6, 200 * GBIT),
    "ethernet-100": Link(50e-6, 100 * GBIT),
    "ethernet-25": Link(50e-6, 25 * GBIT),
    "ethernet-10": Link(50e-6, 10 * GBIT),
}


@dataclass(frozen=True)
class Forecast:
    """A job whose local batch stays the same on any number of GPUs.

    job: one micro-batch on one GPU. batch: its samples. intra_node, inter_node: the links in a node
    and across nodes. bytes_factor: bytes sent for each byte of gradients.
    """

    job: Job
    batch: float
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    accumulate: int = 1
    bytes_factor: float = 1.0

    def seconds(self, gpus: int) -> float:
        """The time of one step of the optimizer."""
        return step(self.job, lambda size: self.all_reduce(size, gpus), self.accumulate).seconds

    def all_reduce(self, size: float, gpus: int) -> float:
        return two_levels(
            size * self.bytes_factor, gpus, self.gpus_per_node, self.intra_node, self.inter_node
        )

    def sharing_one_batch(self, gpus: int, half_seconds: float) -> "Forecast":
        """The job whose GPUs divide the batch of one among them, so each step computes less.

        half_seconds: one GPU's step with half the batch. A part of a step is as long for any batch;
        it follows from the two, and the rest shrinks with the batch.
        """
        fixed = 2 * half_seconds - self.job.seconds
        seconds = fixed + (self.job.seconds - fixed) / gpus
        job = replace(self.job, forward=seconds / 3, backward=2 * seconds / 3)
        return replace(self, job=job, batch=self.batch / gpus)

    def rate(self, gpus: int) -> float:
        """Samples per second of all GPUs together."""
        return self.batch * self.accumulate * gpus / self.seconds(gpus)

    def efficiency(self, gpus: int) -> float:
        """The rate, divided by that of as many GPUs that never wait for each other."""
        return self.rate(gpus) / (self.batch * gpus / self.job.seconds)

    def bound(self, gpus: int) -> str:
        """What limits the step: computing, the latency of messages, or their bytes."""
        without_latency = replace(
            self,
            intra_node=replace(self.intra_node, alpha=0.0),
            inter_node=replace(self.inter_node, alpha=0.0),
        )
        now = self.seconds(gpus)
        gains = {
            "latency": now - without_latency.seconds(gpus),
            "bytes": now - replace(self, bytes_factor=0.0).seconds(gpus),
        }
        if now < 1.02 * self.job.seconds * self.accumulate or max(gains.values()) < 0.01 * now:
            return "computing"
        return max(gains, key=gains.__getitem__)

    def remedies(self, gpus: int) -> Iterator[tuple[str, "Forecast", int]]:
        """What would help, the mildest change first: a name, the new forecast, its GPUs."""
        yield "send bf16 (bf16_compress_hook)", replace(self, bytes_factor=0.5), gpus
        for k in (2, 4, 8, 16):
            yield f"accumulate {k}, with no_sync", replace(self, accumulate=k), gpus
        double = replace(self.job, forward=2 * self.job.forward, backward=2 * self.job.backward)
        yield "a local batch twice as large", replace(self, job=double, batch=2 * self.batch), gpus
        yield "send bf16, and accumulate 4", replace(self, bytes_factor=0.5, accumulate=4), gpus
        good = [n for n in counts_to(gpus)[:-1] if self.efficiency(n) >= GOOD]
        yield f"fewer ranks: {max(good, default=1)}", self, max(good, default=1)

    def advice(self, gpus: int) -> str:
        now = self.efficiency(gpus)
        if gpus == 1:
            return "nothing to mend: one GPU waits for no other."
        if now >= GOOD:
            return f"nothing to mend: {gpus} GPUs do the work of {now * gpus:,.1f}."
        *remedies, (name, fallback, fewer) = self.remedies(gpus)
        for remedy, better, _ in remedies:
            if (then := better.efficiency(gpus)) >= GOOD:
                ending = f"to {then:.0%} of {gpus} GPUs, from {now:.0%}"
                return f"{remedy}: {better.rate(gpus):,.0f} samples/s, {ending}."
        few = f"{fewer} {'does' if fewer == 1 else 'do'} {fallback.rate(fewer):,.0f} samples/s"
        return f"take a faster link, or {name}: {few}, {gpus} do {self.rate(gpus):,.0f}."


def gradients_of_unknown(parameters: float) -> list[tuple[float, float]]:
    """Of a model that we know only by its size."""
    return [(4 * parameters / PIECES, (i + 1) / PIECES) for i in range(PIECES)]


def one_gpu_job(seconds: float, gradients: list[tuple[float, float]]) -> Job:
    return Job(seconds / 3, 2 * seconds / 3, 0.0, fill_buckets(gradients))


def counts_to(gpus: int) -> list[int]:
    """Return 1, 2, 4 ... and the last number of GPUs."""
    return [*(2**power for power in range(gpus.bit_length()) if 2**power < gpus), gpus]


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add, positive = parser.add_argument, int_at_least(1)
    real = float_at_least(1e-6)
    add("--model", default="resnet50", metavar="NAME", help="net, or a classifier of torchvision")
    add("--image-size", default=224, type=positive, metavar="N", help="pixels")
    add("--parameters", type=real, metavar="N", help="of another model, such as 7e6")
    add("--batch-size", default=64, type=positive, metavar="N", help="on each GPU")
    add("--step-ms", type=real, metavar="F", help="step of one GPU with that batch")
    add("--half-step-ms", type=real, metavar="F", help="the same with half the batch; for --hours")
    add("--hours", type=real, metavar="F", help="that one GPU needs for the whole job")
    add("--gpus", default=64, type=positive, metavar="N", help="GPUs in all")
    add("--gpus-per-node", default=8, type=positive, metavar="N", help="1: a cable per GPU")
    add("--inside", default="nvlink-h100", choices=LINKS, help="the link in a node")
    add("--link", default="ethernet-25", choices=LINKS, help="the link between nodes")
    add("--gbit", type=real, metavar="F", help="rate of each node, one way; replaces --link's")
    add("--latency-us", type=real, metavar="F", help="of a message; replaces --link's")
    return parser.parse_args()


def plan(args: Namespace) -> Forecast:
    if args.step_ms is None:
        raise UsageError("there is no step time: run stage 01, or try --step-ms 45")
    if args.half_step_ms and not args.step_ms / 2 <= args.half_step_ms <= args.step_ms:
        raise UsageError(
            f"--half-step-ms {args.half_step_ms:g}: half the batch takes half of --step-ms or more "
            f"and at most all of it: try a number from {args.step_ms / 2:g} to {args.step_ms:g}"
        )
    if args.half_step_ms and not args.hours:
        raise UsageError("--half-step-ms is for --hours, which is missing: try --hours 216")
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise UsageError(
            f"--gpus {args.gpus} are not whole nodes of {args.gpus_per_node}: "
            f"try --gpus {args.gpus // args.gpus_per_node * args.gpus_per_node}"
        )
    if args.parameters:
        gradients = gradients_of_unknown(args.parameters)
    else:
        gradients = gradients_of_classifier(args.model, args.image_size)
    job, link = one_gpu_job(args.step_ms / 1000, gradients), LINKS[args.link]
    inter_node = Link(
        args.latency_us * 1e-6 if args.latency_us else link.alpha,
        args.gbit * GBIT if args.gbit else link.beta,
    )
    return Forecast(job, args.batch_size, args.gpus_per_node, LINKS[args.inside], inter_node)


def row(name: object, forecast: Forecast, gpus: int) -> tuple:
    batch = forecast.batch * forecast.accumulate * gpus
    step, rate = 1000 * forecast.seconds(gpus), forecast.rate(gpus)
    ends = f"{forecast.efficiency(gpus):.0%}", forecast.bound(gpus)
    return name, f"{batch:,.0f}", f"{step:,.1f}", f"{rate:,.0f}", *ends


def hours(args: Namespace, forecast: Forecast, gpus: int) -> list[str]:
    """What the whole job takes with the same batch on each GPU, and with the same in all."""
    if not args.hours:
        return []
    jobs = [forecast]
    if args.half_step_ms:
        jobs.append(forecast.sharing_one_batch(gpus, args.half_step_ms / 1000))
    return [f"{args.hours * forecast.rate(1) / job.rate(gpus):,.0f}" for job in jobs]


def main() -> None:
    args = parse_args()
    forecast = plan(args)
    title = f"{args.parameters:,.0f} parameters" if args.parameters else args.model
    size = sum(bucket.size for bucket in forecast.job.buckets)
    print(f"{title}: {size / 1e6:,.1f} MB of gradients in {len(forecast.job.buckets)} buckets\n")
    heads = ("global batch", "step, ms", "samples/s", "efficiency", "bound by")
    right = *("right",) * 4, "left"
    rows = [
        (*row(n, forecast, n), *hours(args, forecast, n))
        for n in counts_to(args.gpus)
        if n <= args.gpus_per_node or not n % args.gpus_per_node
    ]
    more = ("hours", f"hours, {args.batch_size} in all")[: len(hours(args, forecast, 1))]
    align = ("right", *right, *["right"] * len(more))
    print(tabulate(rows, ("GPUs", *heads, *more), colalign=align, disable_numparse=True))
    if args.gpus > 1:
        rows = [row(name, remedy, n) for name, remedy, n in forecast.remedies(args.gpus)]
        remedy_heads = (f"{args.gpus} GPUs, but", *heads)
        print()
        print(tabulate(rows, remedy_heads, colalign=("left", *right), disable_numparse=True))
    print("\n" + fill(f"Advice: {forecast.advice(args.gpus)}", 90))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
