"""After each epoch, the statistics of BatchNorm are computed anew, by the exact mean over batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Linear(24, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


@torch.no_grad()
def update_bn_stats(net, loader):
    count, mean, square = torch.zeros(1), torch.zeros(24), torch.zeros(24)
    for x, _ in loader:
        h = net.first(x)
        count += len(h)
        mean += h.sum(0)
        square += h.square().sum(0)
    mean, square = mean / count, square / count
    net.norm.running_mean.copy_(mean)
    net.norm.running_var.copy_(square - mean.square())


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    sums = torch.zeros(2)
    for x, y in loader:
        sums[0] += (net(x) - y).square().sum()
        sums[1] += len(x)
    net.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def waves(n, seed):
    x = torch.rand(n, 6, generator=torch.Generator().manual_seed(seed)) * 3
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    train, test = waves(192, 0), waves(60, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=12, sampler=sampler)
    test_loader = DataLoader(test, batch_size=10, sampler=range(rank, len(test), world))
    net = Net()
    ddp = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        update_bn_stats(net, loader)
        error = evaluate(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: test error {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
