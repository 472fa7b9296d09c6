"""The batch grows or shrinks 8 times: which learning rate does it need then?

    python 05_amp_syncbn/large_batch.py

The same epochs with 8 times the batch have an eighth of the updates. With the old rate, the model
learns less. The linear rule (Goyal et al. 2017, arXiv 1706.02677, section 2.1) takes 8 times the
rate, so that one update moves the weights as far as 8 did. It fails if that is too far, most often
at the start, when weights change fast. So the rate warms up (section 2.2). The square-root rule
keeps the noise of an update (Krizhevsky 2014, arXiv 1404.5997, page 5). schedule.py computes the
rates, for train.py too. If the batch shrinks, the same rules divide the rate.
"""

import math
import statistics
from argparse import Namespace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import SGD

from common.data import load_dataset
from common.options import Parser
from schedule import learning_rates

BASE, GROWTH = 30, 8
LRS = {0.05: "well tuned for", 0.2: "already too large for"}
MOMENTUM, EPOCHS, SEEDS = 0.9, 16, range(3)
RULES = {"none": 1.0, "sqrt": GROWTH**0.5, "linear": float(GROWTH)}
SHRINKING_LR = 0.4  # well tuned for the batch of 240
UNSTEADY, CHANCE = 0.17, math.log(10)  # test losses; CHANCE: of guessing one of ten classes


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 49) in float64 and labels (N,) of the training set, then of the test set."""
    tensors: list[Tensor] = []
    for part in load_dataset(Namespace(dataset="digits", data_dir=Path("data"), batch_size=BASE)):
        images, labels = zip(*(part[i] for i in range(len(part))), strict=True)
        tensors += [F.avg_pool2d(torch.stack(images), 4).flatten(1).double(), torch.stack(labels)]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def new_model(seed: int) -> nn.Module:
    """Make a smooth model in float64: its last bit, which varies between CPUs, matters little."""
    torch.manual_seed(seed)
    layers = nn.Linear(49, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(*layers).double()


def train(batch: int, lr: float, rule: str, warm_up_epochs: float, seed: int) -> float:
    """Train, and return the test loss after the epochs."""
    images, labels, test_images, test_labels = digits()
    steps = len(images) // batch  # per epoch: full batches only
    model = new_model(seed)
    optimizer = SGD(model.parameters(), lr, MOMENTUM)
    args = Namespace(lr=lr, batch_size=batch, base_batch_size=BASE, epochs=EPOCHS)
    args.lr_rule, args.warmup_epochs, args.lr_decay = rule, warm_up_epochs, "none"
    for epoch in range(EPOCHS):
        batches = torch.randperm(len(images)).split(batch)
        for chosen, rate in zip(batches, learning_rates(args, epoch, steps), strict=False):
            optimizer.param_groups[0]["lr"] = rate
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(test_images), test_labels).item()


@cache
def median_loss(batch: int, lr: float, rule: str, warm_up_epochs: float) -> float:
    """Return the median test loss of all seeds, or inf if most runs end in nan."""
    losses = [train(batch, lr, rule, warm_up_epochs, seed) for seed in SEEDS]
    return statistics.median(loss if math.isfinite(loss) else math.inf for loss in losses)


def grade(loss: float) -> str:
    """Tell a large loss in words, because its digits depend on the last bit of a CPU's numbers."""
    if loss < UNSTEADY:
        return f"{loss:.2f}"
    return "unsteady" if loss < CHANCE else "diverged"


def main() -> None:
    torch.set_num_threads(1)
    samples = len(digits()[0])
    print(f"{EPOCHS} epochs of the digits, median test loss of {len(SEEDS)} seeds")
    print(f"(unsteady: above {UNSTEADY}; diverged: above {CHANCE:.1f}, the loss of guessing)")
    for base_lr, suitability in LRS.items():
        print(f"\nbase rate {base_lr}, {suitability} a batch of {BASE}:\n")
        small = [(BASE, "", 0)]
        large = [(BASE * GROWTH, rule, warm_up) for rule in RULES for warm_up in (0, 2)]
        rows = []
        for batch, rule, warm_up in small + large:
            lr = f"{base_lr * RULES[rule or 'none']:.2f}"
            loss = median_loss(batch, base_lr, rule or "none", warm_up)
            rows.append((batch, samples // batch * EPOCHS, rule, lr, warm_up or "", grade(loss)))
        heads = ("batch", "updates", "rule", "lr", "warm-up epochs", "test loss")
        align = ["right"] * 2 + ["left"] * 4
        print(tabulate(rows, heads, disable_numparse=True, colalign=align))
    print(f"\nrate {SHRINKING_LR}, well tuned for a batch of {BASE * GROWTH}; then {BASE}:\n")
    shrunk = []
    for rule, divisor in {"kept": 1.0, "÷ √8": GROWTH**0.5, "÷ 8": float(GROWTH)}.items():
        lr = SHRINKING_LR / divisor
        shrunk.append((BASE, rule, f"{lr:.2f}", grade(median_loss(BASE, lr, "none", 0))))
    print(tabulate(shrunk, ("batch", "rate", "lr", "test loss"), disable_numparse=True))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
