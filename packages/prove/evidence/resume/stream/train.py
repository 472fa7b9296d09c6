"""A stream of lines, read once: the checkpoint has the number of the next line of each rank."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

BATCH, STEPS, SAVE_EVERY = 8, 24, 4


class Lines(IterableDataset):
    """Every rank reads each second line (of two ranks), beginning with `position`."""

    def __init__(self, rank, world_size, vocabulary=29):
        self.rank, self.world_size, self.vocabulary = rank, world_size, vocabulary
        self.position = 0

    def line(self, number):
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(self.vocabulary, (1,), generator=generator)
        return (start + torch.arange(7) * (1 + number % 3)) % self.vocabulary

    def __iter__(self):
        number = self.position
        while True:
            yield self.line(number * self.world_size + self.rank)
            number += 1


class Model(nn.Module):
    def __init__(self, vocabulary=29, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.output(self.gru(self.embedding(tokens))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="stream")
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(70)
    lines = Lines(dist.get_rank(), dist.get_world_size())
    model = Model()
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=5e-3)
    step = 0
    if args.resume_from_checkpoint:
        state = torch.load(args.resume_from_checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        lines.position = state["position"]
    for batch in DataLoader(lines, batch_size=BATCH):
        loss = F.cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            print(f"{step:3} {loss.item():.4f}")
            os.makedirs(args.folder, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step, "position": step * BATCH}
            torch.save(state, os.path.join(args.folder, f"step{step:05}.pt"))
        if step == STEPS:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
