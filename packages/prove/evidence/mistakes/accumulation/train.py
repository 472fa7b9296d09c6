"""Recognizes which of five words a sound is; each step adds up the gradients of four batches."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sounds(count, seed):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(5, (count,), generator=g)
    waves = torch.linspace(0, 6, 15) * (1 + words[:, None])
    noise = 2 * torch.randn(count, 2, 15, generator=g)
    return TensorDataset(torch.stack([waves.sin(), waves.cos()], dim=1) + noise, words)


def recognizer():  # (batch, 2, 15) -> (batch, 5)
    layers = nn.Conv1d(2, 12, 5), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 11, 5)
    return nn.Sequential(*layers)


def train_epoch(ddp, loader, optimizer, accumulate=4):
    for number, (sound, word) in enumerate(loader):
        averages = number % accumulate == 0  # once in each step
        with nullcontext() if averages else ddp.no_sync():
            (F.cross_entropy(ddp(sound), word) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, (test_sounds, test_words) = sounds(128, seed=1), sounds(500, seed=2).tensors
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8 // world_size, sampler=sampler)
    ddp = DDP(recognizer())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        train_epoch(ddp, loader, optimizer)
        with torch.no_grad():
            guess = ddp.module(test_sounds).argmax(1)
        accuracy = (guess == test_words).double().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
