"""A small usual script: an IterableDataset with workers, and two parts of a model."""

from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SAMPLES, WORKERS = 96, 0


class Stream(IterableDataset):
    """Samples as they come from a file: each rank and each worker takes its part of them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        points = torch.randn(SAMPLES, 2, 5, generator=generator)
        worker = get_worker_info()
        parts = worker.num_workers if worker else 1
        part = self.rank * parts + (worker.id if worker else 0)
        return islice(points, part, None, self.world_size * parts)


class TwoTowers(nn.Module):
    """Two views of each sample, and how much each view of one looks like each view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, pairs: torch.Tensor) -> tuple:
        left, right = self.left(pairs[:, 0]), self.right(pairs[:, 1])
        return F.normalize(left, dim=1), F.normalize(right, dim=1)


def all_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks; those of this rank keep their gradient."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = Stream(rank, world_size)
    loader = DataLoader(dataset, batch_size=12 // world_size, num_workers=WORKERS)
    ddp = DDP(TwoTowers())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(3):
        dataset.epoch = epoch
        total, steps = torch.zeros(()), 0
        for pairs in loader:
            left, right = map(all_rows, ddp(pairs))
            likeness = left @ right.T / 0.1
            loss = F.cross_entropy(likeness, torch.arange(len(likeness)))
            optimizer.zero_grad()
            # Each rank has the gradient of its own rows only, and DDP divides by world_size.
            (loss * world_size).backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1
        if rank == 0:
            print(f"epoch {epoch}  loss {total / steps:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
