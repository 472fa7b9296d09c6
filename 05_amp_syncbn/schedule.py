"""The learning rate of each step: a rule for the batch size, a warm-up, then a decay.

    python 05_amp_syncbn/schedule.py --lr-rule linear --batch-size 480 --warmup-epochs 2

Besides the flags, the rate depends on the epoch and on the step in it. So a resumed run needs
nothing else from its checkpoint, whatever stage or batch size wrote it. A step that the loss scaler
skips counts like any other.
"""

import math
from argparse import ArgumentParser, Namespace

from common.options import float_at_least, int_at_least, make_parser


def add_schedule(parser: ArgumentParser) -> None:
    add = parser.add_argument
    rules, decays = ("none", "linear", "sqrt"), ("none", "step", "cosine")
    add("--lr-rule", default="none", choices=rules, help="how --lr grows with the batch size")
    add("--base-batch-size", default=120, type=int_at_least(1), help="batch that --lr is for")
    add("--warmup-epochs", default=0.0, type=float_at_least(0), help="epochs while the rate rises")
    add("--lr-decay", default="none", choices=decays, help="how the rate falls after the warm-up")


def lr_factor(args: Namespace, step: int, steps_per_epoch: int) -> float:
    """Return the factor of --lr in a step; steps count from 0 over all epochs."""
    growth = args.batch_size / args.base_batch_size
    factor = {"none": 1.0, "linear": growth, "sqrt": growth**0.5}[args.lr_rule]
    warm_up, end = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch
    if step < warm_up:
        return factor * min(1.0, (step + 1) / warm_up)
    done = (step - warm_up) / max(1.0, end - warm_up)  # from 0 to 1
    if args.lr_decay == "step":
        factor *= 0.1 ** int(3 * done)  # divided by 10 after each third
    elif args.lr_decay == "cosine":
        factor *= (1 + math.cos(math.pi * done)) / 2
    return factor


def learning_rates(args: Namespace, epoch: int, steps: int) -> list[float]:
    """Return the learning rate of each step of an epoch, which has that many steps."""
    return [args.lr * lr_factor(args, epoch * steps + step, steps) for step in range(steps)]


def main() -> None:
    parser = make_parser("schedule", __doc__)
    add_schedule(parser)
    parser.set_defaults(lr_rule="linear", batch_size=480, warmup_epochs=2.0, lr_decay="cosine")
    args = parser.parse_args()
    epochs = [learning_rates(args, epoch, steps=100) for epoch in range(args.epochs)]
    highest = max(map(max, epochs)) or 1.0
    for epoch, rates in enumerate(epochs, start=1):
        bar = "#" * round(40 * rates[-1] / highest)
        print(f"epoch {epoch:2}  lr {rates[0]:.4f} to {rates[-1]:.4f}  {bar}".rstrip())


if __name__ == "__main__":
    main()
