"""A rare class is drawn as often as the others: a sampler with weights."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def imbalanced(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.1).long()
    x = torch.randn(n, 8, generator=g) + 1.5 * y[:, None]
    return TensorDataset(x, y)


def get_loader(dataset, batch_size, seed):
    labels = dataset.tensors[1]
    weights = 1.0 / torch.bincount(labels)[labels]
    per_rank = len(dataset) // dist.get_world_size()
    g = torch.Generator().manual_seed(seed)
    sampler = WeightedRandomSampler(weights, per_rank, replacement=True, generator=g)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train_one_epoch(model, loader, optimizer, criterion):
    model.train()
    running = torch.zeros(2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        running += torch.tensor([loss.item() * len(y), len(y)])
    dist.all_reduce(running)
    return (running[0] / running[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    loader = get_loader(imbalanced(400, seed=3), batch_size=20, seed=7)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(4):
        loss = train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss())
        if dist.get_rank() == 0:
            print(f"[{epoch}] loss={loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
