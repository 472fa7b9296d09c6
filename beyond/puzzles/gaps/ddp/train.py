"""Learns to tell two spirals apart, with DDP and its sampler."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(count, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=g)
    turn = 1 + 4 * torch.rand(count, generator=g)
    angle = turn + labels * torch.pi
    return torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 3, labels


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    train_set = TensorDataset(*spirals(320, seed=1))
    test_points, test_labels = spirals(500, seed=2)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    # YOUR LINES, here and in the loop. A script for one process has no more than this; DDP, its
    # sampler, and what the sampler must hear in each epoch are three calls, and two of their
    # results must be used.
    loader = DataLoader(train_set, batch_size=16 // world_size, shuffle=True)
    for epoch in range(4):
        for points, labels in loader:
            loss = F.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(test_points).argmax(1) == test_labels).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: {right:.3f} right")
    dist.destroy_process_group()
    return right


if __name__ == "__main__":
    main()
