"""The test accuracy that stands beside a speed: the same small training, with each variant.

python benchmarks/accuracy.py
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.data import load_dataset
from common.models import build_model
from common.options import Parser

from timing import ROOT

EPOCHS, SAMPLES = 3, 60  # and the global batch


class Training(Protocol):
    """A model of its own and its optimizer; called with images and labels, it does one step."""

    plain: nn.Module  # without wrapper
    optimizer: Optimizer
    layout: torch.memory_format

    def __call__(self, images: Tensor, labels: Tensor) -> None: ...


def learn(
    prepare: Callable[[nn.Module], Training], seed: int, device: torch.device, steps: int | None
) -> float:
    """The test accuracy of resnet18 after a short training on the digits, on all ranks if any.

    steps: only so many, with a smaller network, to see that it runs.
    """
    args = Namespace(dataset="digits", data_dir=ROOT / "data", batch_size=SAMPLES)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(seed)
    training = prepare(build_model("resnet18" if steps is None else "net-bn", train_set))
    whole = len(train_set) // SAMPLES * SAMPLES  # one shape: compiled once
    generators = [torch.Generator().manual_seed(seed + epoch) for epoch in range(EPOCHS)]
    orders = [torch.randperm(len(train_set), generator=each)[:whole] for each in generators]
    ranks = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
    batches = torch.cat(orders).view(-1, SAMPLES)[:steps, rank::world_size]
    decay = LambdaLR(training.optimizer, lambda step: 1 - step / len(batches))  # or seeds differ
    for index in batches.tolist():
        images, labels = train_set.__getitems__(index)  # (B, 1, 28, 28), (B,)
        training(images.to(device, memory_format=training.layout), labels.to(device))
        decay.step()
    images, labels = test_set.__getitems__(range(len(test_set)))
    with torch.no_grad():  # in fp32, as train.py does, and not compiled
        outputs = training.plain.eval().forward(images.to(device))
    return (outputs.argmax(dim=1).cpu() == labels).double().mean().item()


class Plain:
    """Nothing switched on: what all others are compared with."""

    layout: torch.memory_format = torch.contiguous_format

    def __init__(self, model: nn.Module) -> None:
        self.plain = model.train()
        self.optimizer: Optimizer = SGD(model.parameters(), 0.02, 0.9)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.plain(images), labels).backward()
        self.optimizer.step()


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    for seed in range(3):
        print(f"seed {seed}: {learn(Plain, seed, torch.device('cpu'), None):.1%}")
