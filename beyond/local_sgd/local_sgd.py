"""Local SGD and DiLoCo: ranks train alone for H steps, and then average what they have changed.

    torchrun --standalone --nproc-per-node=2 beyond/local_sgd/local_sgd.py

DDP sends gradients in every step, so a slow link makes every step slow. Here, the ranks send once
in H steps, and the optimizer of the loop stays as it is:

    outer = LocalSGD(model, every=32)  # every rank now has rank 0's weights and buffers
    for images, labels in loader:
        ...
        optimizer.step()
        outer.step()                   # only every 32nd call sends anything
    outer.finish()                     # every rank now has the same weights; then evaluate and save

The mean change is treated as a gradient, with which a second optimizer takes the outer step. With
rate 1 and without momentum, that step is the mean of the weights (Stich, Local SGD Converges Fast
and Communicates Little, arXiv 1805.09767). DiLoCo takes Nesterov's momentum (Douillard et al.,
arXiv 2311.08105). Page: README.md
"""

import copy
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common.data import ImageSet, collate, load_dataset
from common.models import build_model
from common.options import Parser, UsageError, exit_on, int_at_least
from local_ranks.ranks import init_gloo_or_refuse

DDP, NEVER = "DDP", "never"
STEPS, LOCAL_BATCH, LR = 100, 30, 0.02


class LocalSGD:
    """Every so many steps, one outer step of all ranks with the mean of what each has changed.

    lr, momentum: of the outer step; 1 and 0 average the weights. dtype: of the message, if not that
    of the weights. All ranks must take equally many steps.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.every = every
        self.dtype = dtype
        self.steps = 0  # since the ranks have talked
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)  # every rank must reach this line
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.shared = self.weights()  # what all ranks agree on, and begin a round with
        self.outer = SGD([self.shared], lr, momentum, nesterov=momentum > 0)

    def weights(self) -> Tensor:
        """A copy of the trained parameters, (P,)."""
        return torch.cat([p.detach().flatten() for p in self.parameters])

    @torch.no_grad()
    def step(self) -> None:
        """Call it after each step of the optimizer."""
        self.steps += 1
        if self.steps == self.every:
            self.exchange()

    def exchange(self) -> None:
        """The end of a round: the ranks average what they have changed."""
        change = self.shared - self.weights()  # like a gradient, it points uphill
        message = change.to(self.dtype or change.dtype)
        dist.all_reduce(message)  # every rank must reach this line
        self.shared.grad = message.to(change.dtype) / dist.get_world_size()
        self.outer.step()
        pieces = self.shared.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))
        self.steps = 0

    @torch.no_grad()
    def finish(self) -> None:
        """Average what is left, and BatchNorm's running statistics, which no round has sent."""
        if self.steps:
            self.exchange()
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)  # every rank must reach this line
                buffer /= dist.get_world_size()


def sent_bytes(numbers: int, bytes_each: int, world_size: int) -> float:
    """What each rank sends for one mean: a ring's reduce-scatter and all-gather."""
    return 2 * (world_size - 1) / world_size * numbers * bytes_each


def methods(every: int) -> dict[str, dict[str, Any]]:
    """How the ranks talk to each other, and the options of LocalSGD for it."""
    mean, diloco = {"lr": 1.0, "momentum": 0.0, "every": every}, {"every": every}
    return {
        DDP: {},
        "mean, H = 1": {**mean, "every": 1},
        f"mean, H = {every}": mean,
        f"DiLoCo, H = {every}": diloco,
        f"DiLoCo, H = {every}, bf16": {**diloco, "dtype": torch.bfloat16},
        NEVER: {},
    }


def batches(data: ImageSet, local_batch: int, steps: int, seed: int) -> Iterator[Any]:
    """This rank's batches: the same for each method, and together those of one process."""
    sampler = DistributedSampler(data, seed=seed, drop_last=True)
    loader = DataLoader(data, local_batch, sampler=sampler, drop_last=True, collate_fn=collate)

    def epochs() -> Iterator[Any]:
        for epoch in range(steps):  # enough, if each has one batch
            sampler.set_epoch(epoch)
            yield from loader

    return islice(epochs(), steps)


def train(
    method: str, options: dict[str, Any], model: nn.Module, batches: Iterator[Any]
) -> nn.Module:
    """Train a copy of the model and return it: the same on all ranks, unless they never talk."""
    model = copy.deepcopy(model).train()
    wrapped = DistributedDataParallel(model) if method == DDP else model
    optimizer = SGD(model.parameters(), LR, momentum=0.9)
    outer = LocalSGD(model, **options) if options else None
    for images, labels in batches:
        loss = F.cross_entropy(wrapped(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if outer:
            outer.step()
    if outer:
        outer.finish()
    if method == DDP:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # as stage 04 does before it evaluates
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet) -> float:
    """The share of correct answers. Each rank answers its part of the test set."""
    model.eval()
    local_part = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    correct = torch.zeros((), dtype=torch.int64)
    for images, labels in DataLoader(local_part, 500, collate_fn=collate):
        correct += (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(data)


def compare(every: int) -> str:
    """A table: the same training with each method, what it sends, and what it learns."""
    args = Namespace(dataset="digits", data_dir=Path("data"), batch_size=LOCAL_BATCH)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(0)
    initial_model = build_model("net-bn", train_set)
    trained, weights = {}, {}
    for method, options in methods(every).items():
        order = batches(train_set, LOCAL_BATCH, STEPS, seed=0)
        trained[method] = train(method, options, initial_model, order)
        weights[method] = nn.utils.parameters_to_vector(trained[method].parameters())
    rows = []
    for method, options in methods(every).items():
        messages = 0 if method == NEVER else -(-STEPS // options.get("every", 1))
        bytes_each = options.get("dtype", torch.float32).itemsize
        mean_bytes = sent_bytes(len(weights[method]), bytes_each, dist.get_world_size())
        sent = messages * mean_bytes / 1e6  # MB
        distance = ((weights[method] - weights[DDP]).norm() / weights[DDP].norm()).item()
        learned = accuracy(trained[method], test_set)
        rows.append((method, messages, f"{sent:.1f}", f"{distance:.1%}", f"{learned:.1%}"))
    heads = ("the ranks talk", "times", "MB sent by a rank", "distance to DDP", "test accuracy")
    return tabulate(rows, heads, disable_numparse=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--every",
        default=25,
        type=int_at_least(2, below=STEPS + 1),
        metavar="H",
        help="H: steps of a rank between two messages",
    )
    args = parser.parse_args()
    init_gloo_or_refuse("beyond/local_sgd/local_sgd.py", "one rank talks to nobody")
    table = compare(args.every)
    if dist.get_rank() == 0:
        print(f"net-bn, {STEPS} steps with {LOCAL_BATCH} digits on each of the ranks:\n\n{table}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
