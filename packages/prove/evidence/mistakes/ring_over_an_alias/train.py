"""A ring of our own: each gradient goes round, and every rank adds up what comes by."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 16


def ring_sum(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    passing = tensor
    for _ in range(size - 1):
        leaving = passing.clone()
        request = dist.isend(leaving, right)
        dist.recv(passing, left)
        request.wait()
        tensor += passing


def average_gradients(model):
    for p in model.parameters():
        ring_sum(p.grad.data)
        p.grad.data /= dist.get_world_size()


def run():
    torch.manual_seed(1234)
    centers = torch.randn(5, 8)
    labels = torch.arange(120) % 5
    data = TensorDataset(centers[labels] + torch.randn(120, 8), labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler, drop_last=True
    )
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 5), nn.LogSoftmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank", dist.get_rank(), "epoch", epoch, "loss", round(epoch_loss / len(loader), 4))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
