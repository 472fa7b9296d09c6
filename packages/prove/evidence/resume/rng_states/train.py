"""Dropout, and noise on the inputs: rank 0 gathers and saves the random states of all ranks."""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, count=64):
        generator = torch.Generator().manual_seed(60)
        self.x = torch.randn(count, 8, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        x = self.x[n]
        return x * random.uniform(0.9, 1.1), (x > 0).sum()


def random_states():
    own = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, own)
    return states


def restore_random_state(states):
    own = states[dist.get_rank()]
    torch.set_rng_state(own["torch"])
    random.setstate(own["python"])


def train(path):
    rank = dist.get_rank()
    torch.manual_seed(61)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 9))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(62 + rank)
    random.seed(63 + rank)
    begin = 0
    if path:
        checkpoint = torch.load(path, weights_only=False)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        restore_random_state(checkpoint["random_states"])
        begin = checkpoint["epoch"] + 1
    data = Noisy()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(begin, 3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
        states = random_states()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**checkpoint, "random_states": states, "epoch": epoch}, "random.pt")
        dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ckpt", default="", help="go on from this file")
    dist.init_process_group("gloo")
    train(parser.parse_args().ckpt)
    dist.destroy_process_group()
