"""Stochastic weight averaging: at the end, BatchNorm's statistics of the average are computed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16


def network():
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4)
    )  # fmt: skip


@torch.no_grad()
def accuracy(model, data):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    x, y = data[rank::world]
    counts = torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = 3 * torch.randn(192, 8) + torch.linspace(0, 6, 192)[:, None]
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0) + 2 * (x[:, 2] > 3).long())
    train_set, test_set = TensorDataset(*data[:128]), data
    model = DDP(network())
    average = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch >= 2:
            average.update_parameters(model.module)
    update_bn(loader, average)
    result = accuracy(average, test_set)
    if dist.get_rank() == 0:
        print(f"accuracy of the average {result:.3f}")
        torch.save(average.module.state_dict(), "average.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
