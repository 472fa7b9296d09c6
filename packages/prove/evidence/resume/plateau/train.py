"""ReduceLROnPlateau and early stopping, both by the loss of a validation set; a CSV of metrics."""

import argparse
import csv
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATIENCE = 2


class Metrics:
    def __init__(self, path, append):
        self.file = open(path, "a" if append else "w", newline="")
        self.writer = csv.writer(self.file)
        if not append:
            self.writer.writerow(["epoch", "validation loss", "learning rate"])

    def write(self, *row):
        self.writer.writerow(row)
        self.file.flush()


def main(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(54)
    x = torch.randn(128, 3)
    y = x.prod(1, keepdim=True) + torch.randn(128, 1)
    train_set = TensorDataset(x[:64], y[:64])
    net = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    first, best, bad_epochs = 0, float("inf"), 0
    if path:
        state = torch.load(path)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        plateau.load_state_dict(state["plateau"])
        first, best, bad_epochs = state["epoch"], state["best"], state["bad_epochs"]
    ddp = DDP(net)
    metrics = Metrics("metrics.csv", append=bool(path)) if rank == 0 else None
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    for epoch in range(first, 8):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.mse_loss(net(x[64:]), y[64:]).item()
        plateau.step(loss)
        bad_epochs = 0 if loss < best else bad_epochs + 1
        best = min(best, loss)
        if rank == 0:
            metrics.write(epoch, f"{loss:.4f}", optimizer.param_groups[0]["lr"])
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            state.update(plateau=plateau.state_dict(), epoch=epoch + 1)
            state.update(best=best, bad_epochs=bad_epochs)
            os.makedirs("exp", exist_ok=True)
            torch.save(state, "exp/model.pt")
        dist.barrier()
        if bad_epochs > PATIENCE:
            print(f"no better for {bad_epochs} epochs", file=sys.stderr)
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", metavar="FILE")
    main(parser.parse_args().resume)
