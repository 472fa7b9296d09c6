"""A small usual script: DDP, DistributedSampler, dropout, a schedule, exact evaluation."""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

SAMPLES, TEST_SAMPLES, CLASSES = 96, 33, 3


class Points(Dataset):
    """Points in 6 dimensions, each with some noise, as an augmentation would add it."""

    def __init__(self, size: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(size)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)
        self.points = torch.randn(size, 6, generator=generator)
        self.points[torch.arange(size), self.labels] += 2
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple:
        return self.points[i] + self.noise * torch.randn(6), self.labels[i]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, rank: int, world_size: int) -> tuple[float, float]:
    model.eval()
    shard = Subset(dataset, range(rank, len(dataset), world_size))
    totals = torch.zeros(3)
    for points, labels in DataLoader(shard, batch_size=8):
        logits = model(points)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = Points(SAMPLES, 0.1), Points(TEST_SAMPLES, 0.0)
    ddp = DDP(build_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=12 // world_size, sampler=sampler)
    torch.manual_seed(rank + 1)
    np.random.seed(rank + 1)
    random.seed(rank + 1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ddp.train()
        total = torch.zeros(2)
        for points, labels in loader:
            loss = F.cross_entropy(ddp(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1])
        scheduler.step()
        dist.all_reduce(total)
        test_loss, accuracy = evaluate(ddp.module, test_set, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}  loss {total[0] / total[1]:.6f}  test loss {test_loss:.6f}")
            print(f"accuracy {accuracy:.4f}")
            torch.save(ddp.module.state_dict(), os.environ.get("CHECKPOINT", "plain.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
