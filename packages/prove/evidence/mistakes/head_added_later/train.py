"""Continual learning: each task brings two classes, and the classifier grows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES_PER_TASK = 2


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 20), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(20, CLASSES_PER_TASK)])

    def expand(self):
        self.heads.append(nn.Linear(20, CLASSES_PER_TASK))

    def forward(self, x):
        h = self.body(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def task_data(task, n=96):
    g = torch.Generator().manual_seed(task)
    y = torch.randint(CLASSES_PER_TASK, (n,), generator=g) + CLASSES_PER_TASK * task
    centers = torch.randn(12, 6, generator=torch.Generator().manual_seed(99))
    return TensorDataset(centers[y] + 0.5 * torch.randn(n, 6, generator=g), y)


def learn(model, data, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    learner = Learner()
    model = DDP(learner)
    for task in range(3):
        if task > 0:
            learner.expand()
        learn(model, task_data(task), epochs=1)
    weights = [f"{head.weight.abs().sum():.4f}" for head in learner.heads]
    print("rank", dist.get_rank(), "heads", *weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
