"""Supervised fine-tuning on a stream of rows, which a worker process reads."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Rows(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.first = rank, world_size, 0

    def __iter__(self):
        row = self.first
        while True:
            generator = torch.Generator().manual_seed(row * self.world_size + self.rank)
            x = torch.randn(5, generator=generator)
            yield x, x.clamp(min=0).sum()
            row += 1


def file_of(step):
    return f"ckpt/step_{step}.pt"


def save(step, model, optimizer, rows):
    os.makedirs("ckpt", exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rows": rows}
    torch.save(state, file_of(step))


def load(step, model, optimizer, data):
    state = torch.load(file_of(step))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    data.first = state["rows"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-step", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    data = Rows(dist.get_rank(), dist.get_world_size())
    batches = iter(DataLoader(data, args.batch_size, num_workers=1))
    if args.resume_step:
        load(args.resume_step, model, optimizer, data)
    for step in range(args.resume_step + 1, 17):
        x, y = next(batches)
        loss = nn.functional.mse_loss(ddp(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            if dist.get_rank() == 0:
                save(step, model, optimizer, step * args.batch_size)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
