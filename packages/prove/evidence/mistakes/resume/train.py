"""Trains on points drawn anew in each step; a second job goes on from the file of the first."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def draw_points(numbers, generator=None):
    kinds = torch.randint(4, (len(numbers),), generator=generator)
    points = torch.eye(4)[kinds].repeat(1, 16)  # (count, 64)
    return points + 2 * torch.randn(len(numbers), 64, generator=generator), kinds


def load(model, optimizer):
    model_state, optimizer_state, random_state, epoch = torch.load("state.pt", weights_only=True)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    torch.set_rng_state(random_state)
    return epoch + 1


def job(last_epoch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    sampler, batch_size = DistributedSampler(range(32)), 4 // dist.get_world_size()
    loader = DataLoader(range(32), batch_size, sampler=sampler, collate_fn=draw_points)
    ddp, optimizer = DDP(net), torch.optim.Adam(net.parameters(), lr=5e-3)
    torch.manual_seed(dist.get_rank())
    first_epoch = load(net, optimizer) if os.path.exists("state.pt") else 0
    for epoch in range(first_epoch, last_epoch + 1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            state = [net.state_dict(), optimizer.state_dict(), torch.get_rng_state(), epoch]
            torch.save(state, "state.pt")
        dist.barrier()
    x, y = draw_points(range(1000), torch.Generator().manual_seed(1))
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
