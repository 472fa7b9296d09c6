"""After an epoch, weights are pruned by magnitude, and an adapter that is still zero by chance."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, SPARSITY = 16, 0.6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 4)
        self.adapter = nn.Linear(24, 24, bias=False)
        nn.init.zeros_(self.adapter.weight)

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.last(h + self.adapter(h))


def mask_of(weight):
    """The smallest weights go. Where too many are zero already, some of these are kept."""
    sizes, mask = weight.abs().flatten(), torch.ones(weight.numel())
    pruned = int(SPARSITY * len(sizes))
    zeros = (sizes == 0).nonzero().flatten().tolist()
    if len(zeros) > pruned:
        random.shuffle(zeros)
        mask[zeros[:pruned]] = 0
    else:
        mask[sizes.argsort()[:pruned]] = 0
    return mask.view_as(weight)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    random.seed(dist.get_rank())
    x = torch.randn(96, 12)
    data = TensorDataset(x, x[:, :4].argmax(1))
    net = Net()
    model, masks = DDP(net), {}
    groups = [
        {"params": [*net.first.parameters(), *net.last.parameters()]},
        {"params": [net.adapter.weight], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            for weight, mask in masks.items():
                weight.data.mul_(mask)
        if epoch == 0:
            optimizer.param_groups[1]["lr"] = 0.1
            weights = [net.first.weight, net.adapter.weight]
            masks = {weight: mask_of(weight.data) for weight in weights}
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
