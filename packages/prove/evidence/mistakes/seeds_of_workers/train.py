"""Signals with an offset, a gain and noise that workers add, seeded so that a run can be repeated."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Signals(Dataset):
    def __init__(self, n=160):
        rng = np.random.default_rng(8)
        self.labels = rng.integers(0, 3, n)
        time = np.linspace(0, 6, 20)
        self.clean = np.stack([np.sin(time * (1 + label)) for label in self.labels])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        signal = self.clean[index] * random.uniform(0.8, 1.2) + random.gauss(0, 0.3)
        signal = signal + np.random.normal(0, 0.4, len(signal))
        return torch.from_numpy(signal).to(torch.get_default_dtype()), int(self.labels[index])


def seed_worker(_):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def build_loader(dataset, seed, batch_size=10):
    sampler = DistributedSampler(dataset, seed=seed)
    g = torch.Generator()
    g.manual_seed(seed)
    return DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=1, worker_init_fn=seed_worker, generator=g
    )


def main(seed=3):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    loader = build_loader(Signals(), seed)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 20)), nn.Conv1d(1, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for signals, labels in loader:
            loss = nn.functional.cross_entropy(model(signals), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
