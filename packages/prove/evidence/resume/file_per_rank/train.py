"""Each rank writes a file of its own: weights, optimizer, and what only this rank knows."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS = 4


def samples_of(rank, world_size):
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(80))
    return TensorDataset(x[rank::world_size])


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Checkpoints:
    def __init__(self, folder, rank):
        self.folder, self.rank = Path(folder), rank

    def file(self):
        return self.folder / f"rank{self.rank}.pt"

    def save(self, **state):
        self.folder.mkdir(exist_ok=True)
        torch.save(state, self.file())
        dist.barrier()

    def load(self):
        return torch.load(self.file())


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoints = Checkpoints(args.folder, rank)
    torch.manual_seed(81)
    ddp = DDP(Autoencoder())
    optimizer = torch.optim.RMSprop(ddp.parameters(), lr=2e-3, momentum=0.5)
    order = torch.Generator().manual_seed(82 + rank)
    first = 0
    if args.resume:
        state = checkpoints.load()
        ddp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.set_state(state["order"])
        first = state["epoch"] + 1
    data = samples_of(rank, world_size)
    loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=order))
    for epoch in range(first, EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), x)
            loss.backward()
            optimizer.step()
        checkpoints.save(
            model=ddp.state_dict(),
            optimizer=optimizer.state_dict(),
            order=order.get_state(),
            epoch=epoch,
        )
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="parts")
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
