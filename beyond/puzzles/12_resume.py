"""Trains on fresh noise in each epoch; a second job goes on from the file of the first."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def noisy_points(numbers, generator=None):
    points = torch.eye(4)[numbers % 4].repeat(1, 4)  # (count, 16)
    return points + 1.5 * torch.randn(len(numbers), 16, generator=generator), numbers % 4


def load(model, optimizer):
    model_state, optimizer_state, random_state, epoch = torch.load("state.pt", weights_only=True)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    torch.set_rng_state(random_state)
    return epoch + 1


def job(last_epoch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    ddp, optimizer = DDP(net), torch.optim.Adam(net.parameters(), lr=5e-3)
    sampler = DistributedSampler(range(64))
    loader = DataLoader(range(64), batch_size=16 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(dist.get_rank())
    first_epoch = load(net, optimizer) if os.path.exists("state.pt") else 0
    for epoch in range(first_epoch, last_epoch + 1):
        sampler.set_epoch(epoch)
        for numbers in loader:
            x, y = noisy_points(numbers)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            state = [net.state_dict(), optimizer.state_dict(), torch.get_rng_state(), epoch]
            torch.save(state, "state.pt")
        dist.barrier()
    x, y = noisy_points(torch.arange(400), torch.Generator().manual_seed(1))
    return (net(x).argmax(1) == y).double().mean().item()


def main():
    dist.init_process_group("gloo")
    for last_epoch in (1, 7):
        accuracy = job(last_epoch)
        if dist.get_rank() == 0:
            print(f"after epoch {last_epoch}: accuracy {accuracy:.3f}")
    if dist.get_rank() == 0:
        os.remove("state.pt")
    return accuracy


if __name__ == "__main__":
    main()
