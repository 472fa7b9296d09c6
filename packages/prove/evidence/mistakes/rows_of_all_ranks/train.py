"""Metric learning: a contrastive loss over pairs within the batch of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.margin = margin

    def forward(self, embeddings, labels):
        distance = (embeddings[:, None] - embeddings[None]).pow(2).sum(-1).add(1e-8).sqrt()
        same = labels[:, None] == labels[None]
        other = (self.margin - distance).relu()
        return torch.where(same, distance.pow(2), other.pow(2)).mean()


class DistributedLoss(nn.Module):
    """Gathers what the ranks have embedded, so that the loss sees all pairs."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    @staticmethod
    def all_gather(x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        parts[dist.get_rank()] = x
        return torch.cat(parts)

    def forward(self, embeddings, labels):
        return self.loss(self.all_gather(embeddings), self.all_gather(labels))


def clusters(n=160, classes=6):
    g = torch.Generator().manual_seed(14)
    labels = torch.randint(classes, (n,), generator=g)
    centers = 2 * torch.randn(classes, 9, generator=g)
    return TensorDataset(centers[labels] + torch.randn(n, 9, generator=g), labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    data = clusters()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(9, 20), nn.PReLU(), nn.Linear(20, 3)))
    criterion = DistributedLoss(ContrastiveLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, labels in loader:
            optimizer.zero_grad()
            criterion(model(x), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
