"""Muon whose gradients are reduced in parts: each rank updates its rows, then all are gathered."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16


def orthogonal(matrix, steps=5):
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


class PartitionedMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def reduce(self, grad):
        """The mean over the ranks, in the rows that this rank updates."""
        for owner, rows in enumerate(grad.chunk(self.world)):
            total = rows.clone()
            dist.reduce(total, dst=owner)
            if owner == self.rank:
                rows.copy_(total / self.world)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.reduce(p.grad)
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = orthogonal(buffer).chunk(self.world)[self.rank].contiguous()
                parts = [torch.empty_like(update) for _ in range(self.world)]
                dist.all_gather(parts, update)
                p.sub_(torch.cat(parts), alpha=group["lr"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16, bias=False)
        self.second = nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return self.second(F.relu(self.first(x)).square())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 12)
    data = TensorDataset(x, x[:, :4].argmax(1))
    net = Net()
    optimizer = PartitionedMuon(net.parameters())
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
    print(f"rank {dist.get_rank()}: {sum(p.abs().sum() for p in net.parameters()).item():.4f}")
    dist.destroy_process_group()
