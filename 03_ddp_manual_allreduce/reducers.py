"""Five ways to average gradients: all of them give the same mean.

    python 03_ddp_manual_allreduce/reducers.py
    python 03_ddp_manual_allreduce/reducers.py --train bucketed

The first command shows what each reducer sends. The second trains with one of them, as train.py
does, and compares its losses with those of `per-parameter`. In a training loop:

    reducer = REDUCERS["bucketed"](model)  # every rank now has rank 0's weights and buffers
    loss.backward()
    reducer.finish()                       # every rank now has the mean of all ranks' gradients
    optimizer.step()

If no rank has a gradient for a parameter, it stays without one. If only some ranks have one, the
others count as zero. Make one reducer for a model. Between backward and finish(), do not change
.grad. Page: reducers.md
"""

from argparse import Namespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch.optim import SGD
from torch.utils.data import RandomSampler

from common.data import load_dataset, make_loader
from common.models import Net, build_model
from common.options import Parser, UsageError, cut_batch, make_parser, number, usage_errors_exit
from flat import Flat, PerParameter, Reducer
from overlap import Bucketed
from partition import DataPartitioner
from ranks import start
from ring import ring_all_reduce
from shared_memory import SharedMemory


class Ring(Flat):
    """As Flat, but with the all-reduce of ring.py."""

    def __init__(self, model: torch.nn.Module) -> None:
        if dist.get_backend() == "nccl":
            raise UsageError("the ring sends from main memory, nccl from GPUs only: try gloo")
        super().__init__(model)

    def all_reduce(self) -> None:
        for bucket in self.buckets:
            ring_all_reduce(bucket.memory)


REDUCERS: dict[str, type[Reducer]] = {
    "per-parameter": PerParameter,
    "flat": Flat,
    "bucketed": Bucketed,
    "ring": Ring,
    "shared-memory": SharedMemory,
}


def compare() -> list[tuple[str, int, int, bool]]:
    """One step of `net` with each reducer: what it sends, and whether it gives the mean."""
    rows = []
    for name, reducer_class in REDUCERS.items():
        torch.manual_seed(dist.get_rank())  # different weights on each rank, on purpose
        model = Net(1, 28, 10, batch_norm=False).eval().double()  # eval: without dropout
        reducer = reducer_class(model)
        torch.manual_seed(0)
        batch = torch.randn(8, 1, 28, 28).double()
        expected = torch.autograd.grad(model(batch).square().mean(), reducer.parameters)
        shard = batch.chunk(dist.get_world_size())[dist.get_rank()]
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduces,
            mock.patch.object(dist, "isend", wraps=dist.isend) as messages,
        ):
            model(shard).square().mean().backward()
            reducer.finish()
        pairs = zip(reducer.parameters, expected, strict=True)
        equal = all(p.grad is not None and torch.allclose(p.grad, g, 0, 1e-12) for p, g in pairs)
        rows.append((name, all_reduces.call_count, messages.call_count, equal))
        reducer.close()
    return rows


def train(name: str, args: Namespace) -> list[float]:
    """Train as train.py does, with this reducer; returns the mean loss of all ranks per step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_batch = cut_batch(args.batch_size, world_size)
    train_set, _ = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, local_batch)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    reducer = REDUCERS[name](model)  # all ranks start from rank 0's weights
    shard = DataPartitioner(train_set, [1 / world_size] * world_size, args.seed).use(rank)
    generator, losses = torch.Generator(), []
    loader = make_loader(shard, local_batch, RandomSampler(shard, generator=generator))
    for epoch in range(args.epochs):
        generator.manual_seed(args.seed + epoch)
        torch.manual_seed(args.seed + epoch * world_size + rank)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # some reducers send in here
            reducer.finish()
            optimizer.step()
            losses.append(loss.detach())
    mean = torch.stack(losses) / world_size
    dist.all_reduce(mean)  # every rank must reach this line
    reducer.close()
    return mean.tolist()


def compare_losses(name: str, epochs: int) -> None:
    """Train with this reducer and with the first one, and print the mean loss of each epoch."""
    flags = make_parser("03_ddp_manual_allreduce", "").parse_args([f"--epochs={epochs}"])
    names = (name, "per-parameter")
    losses = [torch.tensor(start(2, train, each, flags)[0]).view(epochs, -1) for each in names]
    means = zip(*(each.mean(dim=1).tolist() for each in losses), strict=True)
    headers = ("epoch", *(f"loss, {each}" for each in names))
    print(tabulate([(i, *pair) for i, pair in enumerate(means, 1)], headers, floatfmt=".4f"))
    furthest = (losses[0] - losses[1]).abs().max().item()
    print(f"{losses[0].numel()} steps; their losses differ by at most {furthest:.0e}")


def main() -> None:
    parser = Parser(__doc__)
    text = "train `net` on the digits with this reducer, on two ranks"
    parser.add_argument("--train", choices=REDUCERS, help=text)
    parser.add_argument("--epochs", default=3, type=number(int, 1), help="epochs to train")
    args = parser.parse_args()
    if args.train:
        return compare_losses(args.train, args.epochs)
    headers = ("reducer", "all-reduces per step", "messages by isend", "equals the mean")
    print(tabulate(start(2, compare)[0], headers))


if __name__ == "__main__":
    with usage_errors_exit():
        main()
