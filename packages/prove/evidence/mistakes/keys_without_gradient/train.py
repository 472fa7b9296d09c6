"""Contrastive pretraining: two views of each picture, compared with the views of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n=128):
        self.x = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.randn(2, 16, generator=torch.Generator().manual_seed(index))
        return self.x[index] + 0.4 * noise[0], self.x[index] + 0.4 * noise[1]


def gather(embedding):
    parts = [torch.zeros_like(embedding) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, embedding)
    parts[dist.get_rank()] = embedding
    return torch.cat(parts)


class InfoNCE(nn.Module):
    def __init__(self, temperature=0.3):
        super().__init__()
        self.temperature = temperature

    def forward(self, a, b):
        all_a, all_b = gather(a), gather(b)
        target = torch.arange(len(a)) + dist.get_rank() * len(a)
        first = F.cross_entropy(a @ all_b.T / self.temperature, target)
        second = F.cross_entropy(b @ all_a.T / self.temperature, target)
        return (first + second) / 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    data = TwoViews()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    criterion = InfoNCE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-6)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for view_1, view_2 in loader:
            z = F.normalize(model(torch.cat([view_1, view_2])), dim=1)
            loss = criterion(*z.chunk(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
