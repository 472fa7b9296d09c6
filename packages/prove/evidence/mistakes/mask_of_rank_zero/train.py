"""SimCLR with a mask of positives, by which also several crops of a picture could be used."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather(z):
    return torch.cat(torch.distributed.nn.functional.all_gather(z), dim=0)


def nt_xent(z, indexes, temperature=0.2):
    everything, all_indexes = gather(z), gather(indexes)
    similarity = torch.exp(z @ everything.T / temperature)
    same = indexes[:, None] == all_indexes[None, :]
    itself = torch.zeros_like(same)
    itself.fill_diagonal_(True)
    positives, negatives = same & ~itself, ~same
    pos = (similarity * positives).sum(1)
    neg = (similarity * negatives).sum(1)
    return -torch.log(pos / (pos + neg)).mean()


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 24), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, x):
        return normalize(self.projector(self.backbone(x)), dim=-1)


def training_step(model, batch):
    index, x1, x2 = batch
    z = model(torch.cat([x1, x2]))
    return nt_xent(z, index.repeat(2))


def make_views(n=96):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 10, generator=g)
    noise = 0.5 * torch.randn(2, n, 10, generator=g)
    return TensorDataset(torch.arange(n), x + noise[0], x + noise[1])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    views = make_views()
    sampler = DistributedSampler(views)
    loader = DataLoader(views, 6, sampler=sampler, drop_last=True)
    model = DDP(SimCLR())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = training_step(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
