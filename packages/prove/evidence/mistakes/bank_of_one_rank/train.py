"""Momentum contrast with a memory bank of negatives."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Crops(Dataset):
    def __init__(self, n=160):
        self.pictures = torch.randn(n, 14, generator=torch.Generator().manual_seed(31))

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, n):
        g = torch.Generator().manual_seed(1000 + n)
        keep = (torch.rand(2, 14, generator=g) > 0.2).to(self.pictures.dtype)
        return self.pictures[n] * keep[0], self.pictures[n] * keep[1]


class MemoryBank(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("bank", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update(self, batch):
        start = int(self.pointer)
        self.bank[start : start + len(batch)] = batch
        self.pointer[0] = (start + len(batch)) % len(self.bank)


class MoCo(nn.Module):
    def __init__(self, dim=6, momentum=0.95):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, dim))
        self.slow = copy.deepcopy(self.encoder).requires_grad_(False)
        self.memory = MemoryBank(80, dim)
        self.momentum = momentum

    @torch.no_grad()
    def key(self, x):
        for slow, fast in zip(self.slow.parameters(), self.encoder.parameters()):
            slow.copy_(self.momentum * slow + (1 - self.momentum) * fast)
        return F.normalize(self.slow(x), dim=1)

    def forward(self, x_query, x_key):
        query, key = F.normalize(self.encoder(x_query), dim=1), self.key(x_key)
        positive = (query * key).sum(1, keepdim=True)
        logits = torch.cat([positive, query @ self.memory.bank.clone().T], dim=1) / 0.2
        self.memory.update(key)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    crops = Crops()
    sampler = DistributedSampler(crops)
    loader = DataLoader(crops, 8, sampler=sampler, drop_last=True)
    model = DDP(MoCo(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.module.encoder.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x_query, x_key in loader:
            optimizer.zero_grad()
            model(x_query, x_key).backward()
            optimizer.step()
    dist.destroy_process_group()
