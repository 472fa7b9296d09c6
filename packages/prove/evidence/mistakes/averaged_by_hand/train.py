"""Fits a line through data with wild outliers: gradients are clipped, and averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def measurements(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    outliers = torch.empty(count, 1).cauchy_(generator=g).clamp(-40, 40)
    return x, x.sum(1, keepdim=True), outliers


class TrainStep:
    def __init__(self, network, optimizer, max_norm):
        self.network, self.optimizer, self.max_norm = network, optimizer, max_norm

    def average(self):
        gradients = [p.grad for p in self.network.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def __call__(self, x, y):
        self.optimizer.zero_grad()
        (self.network(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.max_norm)
        self.average()
        self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y, outliers = measurements(320, seed=1)
    train_set = TensorDataset(x, y + outliers)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16 // world_size, sampler=sampler)
    network = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    step = TrainStep(network, torch.optim.SGD(network.parameters(), lr=0.05), max_norm=1.0)
    test_x, test_y, _ = measurements(500, seed=2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch in loader:
            step(*batch)
        with torch.no_grad():
            error = (network(test_x) - test_y).abs().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: error {error:.4f}")
    dist.destroy_process_group()
    return error


if __name__ == "__main__":
    main()
