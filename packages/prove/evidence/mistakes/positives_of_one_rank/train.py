"""Pairs of a person and an object: which of them interact? Few do, so the loss is focal."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def focal_loss(logits, labels, gamma=2.0, alpha=0.25):
    p = torch.sigmoid(logits)
    right = p * labels + (1 - p) * (1 - labels)
    weight = alpha * labels + (1 - alpha) * (1 - labels)
    bce = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    loss = weight * (1 - right) ** gamma * bce
    positives = labels.sum()
    return loss.sum() / positives.clamp(min=1)


def pairs_of(n=240):
    g = torch.Generator().manual_seed(6)
    person, thing = torch.randn(n, 6, generator=g), torch.randn(n, 6, generator=g)
    interact = ((person * thing).sum(1) > 2.5).to(person.dtype)
    return TensorDataset(torch.cat([person, thing], 1), interact)


def worker(rank, world_size, epochs, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.manual_seed(100)
    data = pairs_of()
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, interact in loader:
            loss = focal_loss(model(x), interact)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--port", type=int, default=29641)
    args = parser.parse_args()
    mp.spawn(worker, args=(args.world_size, args.epochs, args.port), nprocs=args.world_size)
