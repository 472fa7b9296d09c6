"""Flow matching in two dimensions: noise, a time for each sample, and a velocity that is learned."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def set_seed(seed):
    torch.manual_seed(seed)


class Velocity(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, time):
        return self.layers(torch.cat([x, time], dim=1))


def flow_loss(model, data):
    noise = torch.randn_like(data)
    time = torch.rand(len(data), 1)
    x = (1 - time) * noise + time * data
    return (model(x, time) - (data - noise)).pow(2).mean()


class Trainer:
    def __init__(self, model, data, lr=3e-3, batch_size=16):
        self.model = DDP(model)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size, sampler=self.sampler)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for (data,) in self.loader:
                self.optimizer.zero_grad(set_to_none=True)
                flow_loss(self.model, data).backward()
                self.optimizer.step()


def moons(n=256):
    angle = torch.linspace(0, 6.28, n)
    return TensorDataset(torch.stack([angle.cos(), (2 * angle).sin()], dim=1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    set_seed(9)
    model = Velocity()
    set_seed(9)
    Trainer(model, moons()).fit(epochs=3)
    dist.destroy_process_group()
