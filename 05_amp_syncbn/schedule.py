"""The learning rate of a large batch: a rule for the batch, a warm-up, then a decay.

python 05_amp_syncbn/schedule.py
"""

import math
from argparse import ArgumentParser, Namespace

from common.options import make_parser, number


def add_schedule(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--lr-rule", default="none", choices=("none", "linear", "sqrt"), help="for large batches")
    add("--base-batch-size", default=120, type=number(int, 1), help="batch that --lr was tuned for")
    add("--warmup-epochs", default=0.0, type=number(float, 0), help="epochs of a rising rate")
    add("--lr-decay", default="none", choices=("none", "step", "cosine"), help="after the warm-up")


def lr_factor(args: Namespace, step: int, steps_per_epoch: int) -> float:
    """What multiplies --lr in a step, counted from 0 over all epochs."""
    growth = args.batch_size / args.base_batch_size
    factor = {"none": 1.0, "linear": growth, "sqrt": growth**0.5}[args.lr_rule]
    warm_up, end = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch
    if step < warm_up:
        return factor * min(1.0, (step + 1) / warm_up)
    done = (step - warm_up) / max(1.0, end - warm_up)  # from 0 to 1
    if args.lr_decay == "step":
        factor *= 0.1 ** int(3 * done)  # a tenth after each third
    elif args.lr_decay == "cosine":
        factor *= (1 + math.cos(math.pi * done)) / 2
    return factor


def learning_rates(args: Namespace, epoch: int, steps: int) -> list[float]:
    """The learning rate of each step of an epoch. The epoch is all that a resumed run must know."""
    return [args.lr * lr_factor(args, epoch * steps + step, steps) for step in range(steps)]


def main() -> None:
    parser = make_parser("schedule", __doc__)
    add_schedule(parser)
    flags = ["--lr-rule=linear", "--batch-size=480", "--warmup-epochs=2", "--lr-decay=cosine"]
    args = parser.parse_args(flags)
    for epoch in range(args.epochs):
        print(f"epoch {epoch + 1:2}  lr {learning_rates(args, epoch, steps=1)[0]:.4f}")


if __name__ == "__main__":
    main()
