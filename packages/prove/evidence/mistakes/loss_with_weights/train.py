"""Faces: an embedding, and a loss with a margin that has weights of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ArcFaceLoss(nn.Module):
    def __init__(self, people, size, scale=8.0, margin=0.2):
        super().__init__()
        self.W = nn.Parameter(torch.empty(people, size))
        nn.init.normal_(self.W, std=0.1)
        self.scale, self.margin = scale, margin

    def forward(self, embeddings, labels):
        cosine = F.normalize(embeddings) @ F.normalize(self.W).T
        angle = cosine.clamp(-0.999, 0.999).acos()
        angle = angle + self.margin * F.one_hot(labels, len(self.W))
        return F.cross_entropy(self.scale * angle.cos(), labels)


def faces(n=192, people=12):
    g = torch.Generator().manual_seed(21)
    who = torch.randint(people, (n,), generator=g)
    return TensorDataset(
        torch.randn(people, 16, generator=g)[who] + torch.randn(n, 16, generator=g), who
    )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2021)
    dataset = faces()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = nn.Sequential(nn.Linear(16, 32), nn.PReLU(), nn.Linear(32, 8))
    loss_fn = ArcFaceLoss(people=12, size=8)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": loss_fn.parameters(), "lr": 0.5}],
        lr=0.05,
        momentum=0.9,
    )
    model = DDP(model)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for pictures, who in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(pictures), who)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
