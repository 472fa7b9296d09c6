"""Residual layers that are dropped at random, for a whole batch at a time: stochastic depth."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class StochasticDepth(nn.Module):
    def __init__(self, p, seed):
        super().__init__()
        self.p = p
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x):
        if not self.training:
            return x
        survives = torch.rand(1, generator=self.generator) > self.p
        return x * survives / (1 - self.p)


class Residual(nn.Module):
    def __init__(self, width, p, seed):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.depth = StochasticDepth(p, seed)

    def forward(self, x):
        return x + self.depth(self.layers(x))


def build(seed, blocks=4, width=16):
    layers = [Residual(width, p=0.3, seed=seed + n) for n in range(blocks)]
    return nn.Sequential(nn.Linear(6, width), *layers, nn.Linear(width, 3))


def main(seed=11):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(seed)
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, :3] * x[:, 3:]).argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(build(seed=10 * rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


main()
