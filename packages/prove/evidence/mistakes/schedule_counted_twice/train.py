"""A scheduler that counts samples, as some large trainers have it."""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, DECAY_SAMPLES = 16, 320


class ParamScheduler:
    def __init__(self, optimizer, max_lr, min_lr):
        self.optimizer, self.max_lr, self.min_lr = optimizer, max_lr, min_lr
        self.num_samples = 0
        self.step(0)

    def step(self, increment):
        self.num_samples += increment
        progress = min(1.0, self.num_samples / DECAY_SAMPLES)
        share = 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = self.min_lr + share * (self.max_lr - self.min_lr)

    def state_dict(self):
        return {"num_samples": self.num_samples}

    def load_state_dict(self, state):
        self.num_samples = 0
        self.step(state["num_samples"])


def load_checkpoint(folder, model, optimizer, scheduler):
    state = torch.load(Path(folder, "model_optim.pt"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["iteration"]


def initialize(args):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = ParamScheduler(optimizer, 0.1, 0.001)
    iteration = 0
    if args.load:
        iteration = load_checkpoint(args.load, model, optimizer, scheduler)
        scheduler.step(iteration * GLOBAL_BATCH)
    return DDP(model), optimizer, scheduler, iteration


def main(args):
    dist.init_process_group("gloo")
    ddp, optimizer, scheduler, iteration = initialize(args)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(8))
    data = TensorDataset(x, x[:, :3].argmin(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(iteration // len(loader), 4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
            scheduler.step(GLOBAL_BATCH)
            iteration += 1
        if dist.get_rank() == 0:
            parts = {"model": ddp.module, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: part.state_dict() for name, part in parts.items()}
            folder = Path(f"iter_{iteration:07}")
            folder.mkdir(exist_ok=True)
            torch.save({**state, "iteration": iteration}, folder / "model_optim.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", default="")
    main(parser.parse_args())
