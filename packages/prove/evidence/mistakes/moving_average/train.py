"""Learns a landscape; a moving average of the weights is tested, and now and then becomes them."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MovingAverage:
    def __init__(self, model, beta=0.7, update_model_every=10):
        self.model, self.beta, self.steps = model, beta, 0
        self.update_model_every = update_model_every
        self.average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        self.steps += 1
        for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            average.lerp_(weight, 1 - self.beta)
            if self.steps % self.update_model_every == 0:
                weight.copy_(average)


def landscape(count, seed):
    place = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(place, (2 * place).sin().sum(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, (test_places, test_heights) = landscape(256, seed=1), landscape(400, seed=2).tensors
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16 // world_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 1))
    ddp, moving_average = DDP(net), MovingAverage(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for places, heights in loader:
            optimizer.zero_grad()
            (ddp(places) - heights).square().mean().backward()
            optimizer.step()
            if rank == 0:
                moving_average.update()
        with torch.no_grad():
            error = (moving_average.average(test_places) - test_heights).abs().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: error of the average {error:.4f}")
    dist.destroy_process_group()
    return error


if __name__ == "__main__":
    main()
