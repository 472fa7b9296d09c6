"""Predictions for the test set are gathered from all ranks, and the accuracy is taken of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16


def gather(x):
    """Of all ranks, in the order of the data set."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts, 1).flatten()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    predictions, labels = [], []
    for x, y in loader:
        predictions.append(model(x).argmax(1))
        labels.append(y)
    predictions, labels = gather(torch.cat(predictions)), gather(torch.cat(labels))
    model.train()
    return (predictions == labels).double().mean().item()


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(123, 8)
    y = (x[:, :3] + torch.randn(123, 3)).argmax(1)
    train_set, test_set = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, GLOBAL_BATCH // world, sampler=sampler)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, 4, sampler=test_sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
