"""Evaluates a moving average of the weights, which every tenth step goes back into the model."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, beta=0.9, update_every=2, update_model_every=10):
        self.model, self.beta, self.step = model, beta, 0
        self.update_every, self.update_model_every = update_every, update_model_every
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.step % self.update_every == 0:
            for average, current in zip(self.ema_model.parameters(), self.model.parameters()):
                average.lerp_(current, 1 - self.beta)
        if self.step % self.update_model_every == 0:
            for average, current in zip(self.ema_model.parameters(), self.model.parameters()):
                current.copy_(average)


def heights(n=216):
    g = torch.Generator().manual_seed(3)
    place = torch.rand(n, 2, generator=g)
    return TensorDataset(place, (6 * place).sin().prod(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(8)
    data = heights()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=9, sampler=sampler)
    net = nn.Sequential(nn.Linear(2, 40), nn.GELU(), nn.Linear(40, 1))
    ddp, ema = DDP(net), EMA(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for place, height in loader:
            loss = (ddp(place) - height).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                ema.update()
        with torch.no_grad():
            x, y = data.tensors
            error = (ema.ema_model(x) - y).abs().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: error of the average {error:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
