"""Cross-batch memory: embeddings of past batches serve as further pairs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def all_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    parts.pop(dist.get_rank())
    return torch.cat([x, *parts])


class CrossBatchMemory(nn.Module):
    def __init__(self, dim, size=26, margin=0.7):
        super().__init__()
        self.embeddings = torch.zeros(size, dim)
        self.labels = torch.full((size,), -1)
        self.size, self.margin, self.place = size, margin, 0

    def enqueue(self, embeddings, labels):
        for row, label in zip(all_rows(embeddings.detach()), all_rows(labels)):
            self.embeddings[self.place], self.labels[self.place] = row, label
            self.place = (self.place + 1) % self.size

    def forward(self, embeddings, labels):
        self.enqueue(embeddings, labels)
        known = self.labels >= 0
        cosine = embeddings @ self.embeddings[known].T
        same = labels[:, None] == self.labels[known][None]
        return torch.where(same, 1 - cosine, (cosine - self.margin).relu()).mean()


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x):
        return nn.functional.normalize(self.layers(x), dim=1)


def products(n=150):
    g = torch.Generator().manual_seed(77)
    labels = torch.randint(10, (n,), generator=g)
    return TensorDataset(
        torch.randn(10, 8, generator=g)[labels] + 0.3 * torch.randn(n, 8, generator=g), labels
    )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = products()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model, memory = DDP(Embedder()), CrossBatchMemory(dim=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, labels in loader:
            loss = memory(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
