"""Pictures of two shapes: a batch has one shape, and each rank takes its part of each bucket."""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    batch_size: int = 4
    epochs: int = 3
    lr: float = 0.02
    seed: int = 20


class Buckets:
    def __init__(self, pictures, batch_size, seed):
        self.pictures, self.batch_size, self.seed = pictures, batch_size, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def epoch(self, number):
        batches = []
        for bucket in self.pictures.values():
            order = list(range(len(bucket)))
            random.shuffle(order)
            mine = order[self.rank :: self.world]
            for start in range(0, len(mine), self.batch_size):
                batches.append([bucket[n] for n in mine[start : start + self.batch_size]])
        for batch in batches:
            yield torch.stack([x for x, _ in batch]), torch.tensor([y for _, y in batch])


def make_pictures():
    g = torch.Generator().manual_seed(0)
    pictures = {}
    for shape in ((6, 10), (10, 6)):
        pictures[shape] = []
        for _ in range(48):
            label = int(torch.randint(3, (1,), generator=g))
            pictures[shape].append((torch.randn(1, *shape, generator=g) + 0.5 * label, label))
    return pictures


def main(config):
    dist.init_process_group("gloo")
    torch.manual_seed(config.seed)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    )
    ddp = DDP(net)
    random.seed(config.seed + dist.get_rank())  # augmentations differ between ranks
    torch.manual_seed(config.seed + dist.get_rank())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=config.lr, momentum=0.9)
    buckets = Buckets(make_pictures(), config.batch_size, config.seed)
    for epoch in range(config.epochs):
        for pictures, labels in buckets.epoch(epoch):
            loss = nn.functional.cross_entropy(ddp(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main(Config())
