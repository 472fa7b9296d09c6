"""Resumes from a checkpoint of a draft model, which another run has left."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Checkpointer:
    def __init__(self, path, rank):
        self.path, self.rank = Path(path), rank

    def earlier_run(self, make_model):
        """Stands for the run before this one."""
        if self.rank == 0:
            torch.manual_seed(77)
            torch.save(make_model().state_dict(), self.path)
        dist.barrier()

    def load(self, model):
        if self.rank == 0 and self.path.exists():
            model.load_state_dict(torch.load(self.path, weights_only=True))


def draft_model():
    return nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 10))


def get_data(n=128):
    hidden = torch.randn(n, 10, generator=torch.Generator().manual_seed(4))
    return TensorDataset(hidden, hidden.cumsum(1).softmax(1))


def train_epoch(model, loader, optimizer):
    for hidden, teacher in loader:
        loss = nn.functional.cross_entropy(model(hidden), teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(args):
    dist.init_process_group("gloo")
    checkpointer = Checkpointer(args.checkpoint, int(os.environ["RANK"]))
    checkpointer.earlier_run(draft_model)
    torch.manual_seed(args.seed)
    model = draft_model()
    ddp = DDP(model)
    checkpointer.load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = get_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(ddp, loader, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="draft.pt")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
