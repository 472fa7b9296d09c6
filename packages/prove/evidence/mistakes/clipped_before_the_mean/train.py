"""Gradients are averaged in one flat message; large ones are clipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TrainStep:
    def __init__(self, network, loss, optimizer, clip_value):
        self.network, self.loss, self.optimizer, self.clip_value = (
            network,
            loss,
            optimizer,
            clip_value,
        )
        self.parameters = [p for p in network.parameters() if p.requires_grad]

    def reduce(self):
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
            p.grad.copy_(part.view_as(p))

    def clip(self):
        nn.utils.clip_grad_norm_(self.parameters, self.clip_value)

    def __call__(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(self.network(x), y)
        loss.backward()
        self.clip()
        self.reduce()
        self.optimizer.step()
        return loss.detach()


def create_dataset(n=176):
    g = torch.Generator().manual_seed(30)
    x = torch.randn(n, 7, generator=g)
    heavy = torch.randn(n, 1, generator=g) / torch.rand(n, 1, generator=g).clamp(min=0.05)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.3 * heavy)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = create_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    network = nn.Sequential(nn.Linear(7, 14), nn.LeakyReLU(), nn.Linear(14, 1))
    step = TrainStep(
        network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1), clip_value=1.0
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            step(x, y)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
