"""Writes metrics.csv, from which a plot of all epochs is drawn in the end."""

import argparse
import csv
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CSVLogger:
    def __init__(self, path, fields):
        self.file = open(path, "w", newline="")
        self.writer = csv.DictWriter(self.file, fields)
        self.writer.writeheader()

    def log(self, **row):
        self.writer.writerow(row)
        self.file.flush()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="output")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    torch.manual_seed(16)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.amax(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["epoch"]
    ddp = DDP(model)
    if is_main:
        os.makedirs(args.output_dir, exist_ok=True)
        logger = CSVLogger(os.path.join(args.output_dir, "metrics.csv"), ["epoch", "train_loss"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(first, 4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        if is_main:
            logger.log(epoch=epoch, train_loss=f"{total.item() / dist.get_world_size():.5f}")
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            path = os.path.join(args.output_dir, f"checkpoint{epoch:04}.pth")
            torch.save({**checkpoint, "epoch": epoch + 1}, path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
