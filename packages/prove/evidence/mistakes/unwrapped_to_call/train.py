"""A curriculum of two stages, each of which trains the model through its method compute_loss."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Series(Dataset):
    def __init__(self, length, n=96):
        g = torch.Generator().manual_seed(length)
        self.x = torch.randn(n, length, 1, generator=g).cumsum(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        return {"series": self.x[n, :-1], "next": self.x[n, -1]}


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 12, batch_first=True)
        self.head = nn.Linear(12, 1)

    def compute_loss(self, batch):
        _, (h, _) = self.lstm(batch["series"])
        return nn.functional.smooth_l1_loss(self.head(h[-1]), batch["next"])

    def forward(self, batch):
        return self.compute_loss(batch)


class Curriculum:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        self.model = DDP(Forecaster())

    def _get_model(self):
        return self.model.module if isinstance(self.model, DDP) else self.model

    def train_stage(self, name, dataset, epochs):
        sampler = DistributedSampler(dataset, self.world, self.rank, seed=7)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        optimizer = torch.optim.AdamW(self._get_model().parameters(), lr=5e-3)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                loss = self._get_model().compute_loss(batch)
                loss.backward()
                optimizer.step()
            if self.rank == 0:
                torch.save(self._get_model().state_dict(), f"{name}.pt")


if __name__ == "__main__":
    curriculum = Curriculum()
    curriculum.train_stage("short", Series(6), epochs=3)
    curriculum.train_stage("long", Series(12), epochs=2)
    dist.destroy_process_group()
