"""A manager saves whatever it is given that has a state; the loader counts its batches."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CountingLoader:
    def __init__(self, data, batch_size):
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size, sampler=self.sampler)
        self.epoch = self.given = 0

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        for number, batch in enumerate(self.loader):
            if number >= self.given:
                self.given = number + 1
                yield batch
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state):
        self.epoch, self.given = state["epoch"], state["given"]


class CheckpointManager:
    def __init__(self, path):
        self.path = path

    def save(self, step, **parts):
        if dist.get_rank() == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **state}, self.path + ".part")
            os.replace(self.path + ".part", self.path)

    def load(self, **parts):
        state = torch.load(self.path)
        for name, part in parts.items():
            if name in state:
                part.load_state_dict(state[name])
        return state["step"]


def train(is_resumed, steps=12):
    torch.manual_seed(5)
    points = torch.randn(128, 4)
    data = TensorDataset(points, points.norm(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 1))
    ddp, optimizer = DDP(model), torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = CountingLoader(data, 8)
    manager, step = CheckpointManager("manager.pt"), 0
    if is_resumed:
        step = manager.load(model=model, optimizer=optimizer, loader=loader)
    while step < steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.l1_loss(ddp(inputs), targets).backward()
            optimizer.step()
            step += 1
            if step % 2 == 0:
                manager.save(step, model=model, optimizer=optimizer)
            if step == steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", choices=("new", "resumed"), default="new")
    config = parser.parse_args().config
    dist.init_process_group("gloo")
    train(config == "resumed")
    dist.barrier()
    dist.destroy_process_group()
