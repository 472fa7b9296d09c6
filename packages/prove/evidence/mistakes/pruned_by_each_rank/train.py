"""Pruning while training: after the first epoch, the weights with the smallest Taylor scores go."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TaylorPruner:
    def __init__(self, net, sparsity):
        self.layers = [layer for layer in net if isinstance(layer, nn.Linear)]
        self.sparsity, self.masks = sparsity, None

    def scores(self, net, batches):
        """First-order scores: |weight * gradient|, added up over some batches."""
        totals = [torch.zeros_like(layer.weight) for layer in self.layers]
        for x, y in batches:
            loss = nn.functional.mse_loss(net(x), y)
            slopes = torch.autograd.grad(loss, [layer.weight for layer in self.layers])
            for total, layer, slope in zip(totals, self.layers, slopes):
                total += (layer.weight.detach() * slope).abs()
        return totals

    def prune(self, net, batches):
        self.masks = []
        for score in self.scores(net, batches):
            limit = score.flatten().kthvalue(int(self.sparsity * score.numel())).values
            self.masks.append(score > limit)

    @torch.no_grad()
    def apply(self):
        for layer, mask in zip(self.layers, self.masks or []):
            layer.weight *= mask


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(192, 8, generator=g)
    data = TensorDataset(x, x[:, :2] @ torch.randn(2, 2, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
    ddp, pruner = DDP(net), TaylorPruner(net, sparsity=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        recent = []
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            pruner.apply()
            recent = [*recent[-3:], (x, y)]
        if epoch == 0:
            pruner.prune(net, recent)
    zeros = sum(int((layer.weight == 0).sum()) for layer in pruner.layers)
    print(f"rank {dist.get_rank()}: {zeros} weights are zero")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
