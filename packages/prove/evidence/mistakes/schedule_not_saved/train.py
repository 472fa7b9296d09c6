"""A Trainer for fields: warm-up and cosine by the epoch, mixed precision, a file after each epoch."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, args):
        self.args, self.rank = args, int(os.environ["RANK"])
        torch.manual_seed(15)
        fields = torch.randn(64, 1, 12)
        data = TensorDataset(fields, fields.roll(1, dims=2))
        self.model = nn.Sequential(
            nn.Conv1d(1, 6, 3, padding=1), nn.GELU(), nn.Conv1d(6, 1, 3, padding=1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        warmup = LinearLR(self.optimizer, 0.1, total_iters=2)
        cosine = CosineAnnealingLR(self.optimizer, T_max=args.epochs - 2)
        self.scheduler = SequentialLR(self.optimizer, [warmup, cosine], milestones=[2])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=8, sampler=self.sampler)
        self.starting_epoch = 0
        if args.resume:
            self.load_checkpoint("recent.pt")
        self.ddp = DDP(self.model)

    def save_model(self, epoch, name):
        state = {
            "epoch": epoch,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
        }
        torch.save(state, name)

    def load_checkpoint(self, name):
        state = torch.load(name)
        self.model.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.starting_epoch = state["epoch"] + 1

    def train_one_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for before, after in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (self.ddp(before).float() - after).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()

    def train(self):
        for epoch in range(self.starting_epoch, self.args.epochs):
            self.train_one_epoch(epoch)
            if self.rank == 0:
                self.save_model(epoch, "recent.pt")
            dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", action="store_true")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).train()
    dist.destroy_process_group()
