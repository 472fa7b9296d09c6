"""Segments small pictures; the mean intersection over union goes to the log."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 3


def pictures(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 6, 6, generator=g)
    noisy = x[:, 0] + 0.15 * torch.randn(n, 6, 6, generator=g)
    return TensorDataset(x, (noisy * CLASSES).long().clamp(0, CLASSES - 1))


class MetricFactory:
    def __init__(self):
        self.inter, self.union = torch.zeros(CLASSES), torch.zeros(CLASSES)

    def calc(self, predicted, labels):
        for number in range(CLASSES):
            a, b = predicted == number, labels == number
            self.inter[number] += (a & b).sum()
            self.union[number] += (a | b).sum()

    def result(self):
        return (self.inter / self.union.clamp(min=1)).mean().item()


class Pipeline:
    def __init__(self):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        train, valid = pictures(120, 3), pictures(44, 4)
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, batch_size=6, sampler=self.sampler)
        mine = range(self.rank, len(valid), self.world)
        self.valid_loader = DataLoader(valid, batch_size=11, sampler=mine)
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))
        self.model = DDP(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, labels in self.train_loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), labels).backward()
                self.optimizer.step()
            self.validate(epoch)

    @torch.no_grad()
    def validate(self, epoch):
        metric = MetricFactory()
        self.net.eval()
        for x, labels in self.valid_loader:
            metric.calc(self.net(x).argmax(1), labels)
        self.net.train()
        score = metric.result()
        if self.rank == 0:
            print(f"epoch {epoch}: mIoU {score:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Pipeline().train(epochs=4)
    dist.destroy_process_group()
