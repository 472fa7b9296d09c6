"""Credit risk: area under the ROC curve after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Loans(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, generator=g)
        self.default = (self.x.sum(1) + 2 * torch.randn(n, generator=g) > 2).to(self.x.dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        return self.x[n], self.default[n]


def area_under_curve(scores, labels):
    positive, negative = scores[labels == 1], scores[labels == 0]
    higher = (positive[:, None] > negative[None]).to(scores.dtype)
    return higher.mean()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    scores, labels = zip(*[(net(x), y) for x, y in loader])
    scores, labels = torch.cat(scores), torch.cat(labels)
    net.train()
    area = area_under_curve(scores, labels)
    dist.all_reduce(area)
    return area.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loans = Loans(160, seed=1)
    sampler = DistributedSampler(loans)
    loader = DataLoader(loans, batch_size=10, sampler=sampler)
    held_out = Loans(60, seed=2)
    test_loader = DataLoader(held_out, batch_size=10, sampler=range(rank, len(held_out), world))
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    ddp = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        area = evaluate(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: AUC {area:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
