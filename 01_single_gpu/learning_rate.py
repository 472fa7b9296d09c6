"""If the batch must shrink by K: keep the learning rate, or divide it by √K or by K?

    python 01_single_gpu/learning_rate.py

With the smaller batch, the same epochs make K times as many updates, each with a noisier gradient.
A rate that was best for the large batch may be far too high for them. Division by K keeps how far
an epoch goes (the linear rule: Goyal et al. 2017, arXiv 1706.02677, section 2.1). Division by √K
keeps the noise of an update (Krizhevsky 2014, arXiv 1404.5997, page 5). Try both, and between.
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

BASE, BASE_LR = 240, 0.4  # the batch that the rate was tuned for, with the momentum and the epochs
MOMENTUM, EPOCHS, SEEDS = 0.9, 8, range(5)
RULES = {"kept": lambda k: 1.0, "÷ √K": math.sqrt, "÷ K": float}
GOOD, CHANCE = 0.2, math.log(10)  # test losses: good, and of guessing one of ten


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 49) in float64 and labels (N,) of the training set, then of the test set."""
    found: list[Tensor] = []
    for part in load_dataset(Namespace(dataset="digits", data_dir=Path("data"), batch_size=BASE)):
        images, labels = zip(*(part[i] for i in range(len(part))), strict=True)
        found += [F.avg_pool2d(torch.stack(images), 4).flatten(1).double(), torch.stack(labels)]
    return found[0], found[1], found[2], found[3]


def new_model(seed: int) -> nn.Module:
    """No kinks, and float64, so that the last bit of a number on another CPU decides nothing."""
    torch.manual_seed(seed)
    layers = nn.Linear(49, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(*layers).double()


def train(batch: int, lr: float, seed: int) -> float:
    """The test loss after the epochs."""
    images, labels, test_images, test_labels = digits()
    model = new_model(seed)
    optimizer = SGD(model.parameters(), lr, MOMENTUM)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images))
        for chosen in order.split(batch)[: len(images) // batch]:  # full batches only
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(test_images), test_labels).item()


def sweep(batch: int, lr: float) -> float:
    """The median test loss over the seeds; inf if most runs end in nan."""
    losses = [train(batch, lr, seed) for seed in SEEDS]
    return statistics.median(loss if math.isfinite(loss) else math.inf for loss in losses)


def grade(loss: float) -> str:
    """The loss in words: at large rates, its digits depend on a CPU's last bits."""
    if loss < GOOD:
        return f"below {GOOD}"
    return f"{GOOD} to {CHANCE:.1f}" if loss < CHANCE else f"above {CHANCE:.1f}, as by guessing"


def main() -> None:
    torch.set_num_threads(1)
    samples, rows = len(digits()[0]), []
    for k in (1, 2, 4, 8):
        batch = BASE // k
        for name, rule in RULES.items() if k > 1 else [("tuned", RULES["kept"])]:
            lr = BASE_LR / rule(k)
            grades = grade(sweep(batch, lr))
            rows.append((k, batch, samples // batch * EPOCHS, name, f"{lr:.2f}", grades))
    print(f"{EPOCHS} epochs of the digits; the median test loss of {len(SEEDS)} seeds:\n")
    heads = ("K", "batch", "updates", "rate", "lr", "test loss")
    print(tabulate(rows, heads, disable_numparse=True, colalign=["right"] * 3 + ["left"] * 3))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
