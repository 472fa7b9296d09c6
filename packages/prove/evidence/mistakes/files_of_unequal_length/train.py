"""A stream of log files, which are of any length, divided among the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

LENGTHS = [40, 36, 30, 25, 21, 18, 14, 8]  # rows of each file


def read_file(number):
    g = torch.Generator().manual_seed(number)
    for _ in range(LENGTHS[number]):
        x = torch.randn(5, generator=g)
        yield x, (x[:2] * x[2:4]).sum()


class Logs(IterableDataset):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world, self.epoch = rank, world, 0

    def rows(self):
        g = torch.Generator().manual_seed(self.epoch)
        for number in torch.randperm(len(LENGTHS), generator=g)[self.rank :: self.world].tolist():
            yield from read_file(number)

    def __iter__(self):
        yield from self.rows()


def train(model, loader, optimizer):
    for x, y in loader:
        loss = (model(x)[:, 0] - y) ** 2
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    logs = Logs(dist.get_rank(), dist.get_world_size())
    loader = DataLoader(logs, batch_size=6)
    model = DDP(nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for epoch in range(3):
        logs.epoch = epoch
        train(model, loader, optimizer)
    dist.destroy_process_group()
