"""Training in two parts: the second part goes on from the checkpoint that the first one wrote."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Blobs(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(0)
        self.y = torch.randint(4, (n,), generator=g)
        self.x = 2 * torch.randn(4, 7, generator=g)[self.y]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, n):
        return self.x[n] + torch.randn(7), self.y[n]  # another noise whenever it is read


class Checkpoint:
    def __init__(self, folder, rank):
        self.folder, self.rank = Path(folder), rank

    def random_file(self):
        return self.folder / "random.pt"

    def save(self, model, optimizer, epoch):
        if self.rank == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, self.folder / "state.pt")
            torch.save(torch.get_rng_state(), self.random_file())
        dist.barrier()

    def load(self, model, optimizer):
        if not (self.folder / "state.pt").exists():
            return 0
        state = torch.load(self.folder / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(torch.load(self.random_file(), weights_only=True))
        return state["epoch"] + 1


def train(checkpoint, data, until):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 4))
    ddp = DDP(net)
    torch.manual_seed(100 + checkpoint.rank)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(checkpoint.load(net, optimizer), until):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        checkpoint.save(net, optimizer, epoch)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint = Checkpoint(folder[0], int(os.environ["RANK"]))
    train(checkpoint, Blobs(), until=1)
    train(checkpoint, Blobs(), until=5)
    dist.destroy_process_group()
