"""How will my job scale? A forecast from one GPU's step, before you rent a cluster.

    python 04_ddp_torchrun/forecast.py --model resnet50 --batch-size 64 --step-ms 45 --gpus 64

Stage 01 measures the step on one GPU of that kind: --summary runs/01_single_gpu/summary.json. The
model takes a third of it for forward, the rest for backward. alpha_beta.py is the model,
gradient_order.py counts layers and buckets, cluster.py has the links, and scaling.md shows how far
to trust it.
"""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from textwrap import fill as wrap

from tabulate import tabulate

from alpha_beta import Job, Link
from cluster import GBIT, GOOD, LINKS, Forecast, counts_to
from common.options import Parser, UsageError, exit_on_usage_error, float_at_least, int_at_least
from gradient_order import fill, named

PIECES = 100  # an unknown model has this many equal gradients, ready one after the other


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add, count = parser.add_argument, int_at_least(1)
    real = float_at_least(1e-6)
    add("--model", default="resnet50", metavar="NAME", help="net, or a classifier of torchvision")
    add("--image-size", default=224, type=count, metavar="N", help="pixels")
    add("--parameters", type=real, metavar="N", help="of another model, such as 7e6")
    add("--batch-size", default=64, type=count, metavar="N", help="on each GPU")
    add("--step-ms", type=real, metavar="F", help="step of one GPU with that batch")
    add("--summary", type=Path, metavar="PATH", help="model, batch and step of a run of stage 01")
    add("--gpus", default=64, type=count, metavar="N", help="GPUs in all")
    add("--gpus-per-node", default=8, type=count, metavar="N", help="1: a cable per GPU")
    add("--inside", default="nvlink-h100", choices=LINKS, help="the link in a node")
    add("--link", default="ethernet-25", choices=LINKS, help="the link between nodes")
    add("--gbit", type=real, metavar="F", help="rate of each node, one way; replaces --link's")
    add("--latency-us", type=real, metavar="F", help="of a message; replaces --link's")
    add("--accumulate", default=1, type=count, metavar="N", help="micro-batches, with no_sync")
    any_share = float_at_least(0)
    add("--wire", default=1.0, type=any_share, metavar="F", help="bytes sent per byte: 0.5 in bf16")
    add("--spread", default=0.0, type=any_share, metavar="F", help="ranks' times: std / mean")
    return parser.parse_args()


def read_summary(args: Namespace) -> None:
    """Replace flags by the results of a run of stage 01."""
    try:
        found = json.loads(args.summary.read_text())
        args.model, args.batch_size = str(found["model"]), int(found["local_batch"])
        args.step_ms, ranks = float(found["step_ms"]), int(found["world_size"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--summary {args.summary}: expected the summary.json of a run of stage 01 "
            f"({type(error).__name__}: {error}); try python 01_single_gpu/train.py first"
        ) from error
    if ranks != 1:
        raise UsageError(f"--summary {args.summary} is of {ranks} ranks: expected one of stage 01")


def plan(args: Namespace) -> Forecast:
    if args.summary:
        read_summary(args)
    if args.step_ms is None:
        raise UsageError("there is no step time: try --summary PATH, or --step-ms 45")
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise UsageError(
            f"--gpus {args.gpus} are not whole nodes of {args.gpus_per_node}: "
            f"try --gpus {args.gpus // args.gpus_per_node * args.gpus_per_node}"
        )
    if args.parameters:
        gradients = [(4 * args.parameters / PIECES, (i + 1) / PIECES) for i in range(PIECES)]
    else:
        gradients = named(args.model, args.image_size)
    seconds, link = args.step_ms / 1000, LINKS[args.link]
    job = Job(seconds / 3, 2 * seconds / 3, 0.0, fill(gradients))
    between = Link(
        args.latency_us * 1e-6 if args.latency_us else link.alpha,
        args.gbit * GBIT if args.gbit else link.beta,
    )
    nodes = args.gpus_per_node, LINKS[args.inside], between
    return Forecast(job, args.batch_size, *nodes, args.accumulate, args.wire, args.spread)


def row(name: object, found: Forecast, gpus: int) -> tuple:
    batch = found.batch * found.accumulate * gpus
    step, rate = 1000 * found.seconds(gpus), found.rate(gpus)
    ends = f"{found.efficiency(gpus):.0%}", found.bound(gpus)
    return name, f"{batch:,}", f"{step:,.1f}", f"{rate:,.0f}", *ends


def advise(found: Forecast, gpus: int) -> str:
    now = found.efficiency(gpus)
    if now >= GOOD:
        return f"nothing to mend: {gpus} GPUs do the work of {now * gpus:,.1f}."
    for name, other, count in found.remedies(gpus):
        if (then := other.efficiency(count)) >= GOOD and count == gpus:
            ending = f"to {then:.0%} of {gpus} GPUs, from {now:.0%}"
            return f"{name}: {other.rate(count):,.0f} samples/s, {ending}."
    *_, (name, other, count) = found.remedies(gpus)
    slow = f"{count} do {other.rate(count):,.0f} samples/s, {gpus} do {found.rate(gpus):,.0f}"
    return f"take a faster link, or {name}: {slow}."


def main() -> None:
    args = parse_args()
    found = plan(args)
    what = f"{args.parameters:,.0f} parameters" if args.parameters else args.model
    size = sum(bucket.size for bucket in found.job.buckets)
    print(f"{what}: {size / 1e6:,.1f} MB of gradients in {len(found.job.buckets)} buckets\n")
    heads = ("global batch", "step, ms", "samples/s", "efficiency", "bound by")
    plain = partial(tabulate, disable_numparse=True)
    columns = *("right",) * 4, "left"
    rows = [
        row(n, found, n)
        for n in counts_to(args.gpus)
        if n <= args.gpus_per_node or not n % args.gpus_per_node
    ]
    print(plain(rows, ("GPUs", *heads), colalign=("right", *columns)))
    if args.gpus > 1:
        rows = [row(name, other, n) for name, other, n in found.remedies(args.gpus)]
        first = f"{args.gpus} GPUs, but"
        print("\n" + plain(rows, (first, *heads), colalign=("left", *columns)))
    print("\n" + wrap(f"Advice: {advise(found, args.gpus)}", 90))


if __name__ == "__main__":
    with exit_on_usage_error():
        main()
