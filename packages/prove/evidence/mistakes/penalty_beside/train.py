"""A critic with a gradient penalty, and the generator that it judges: WGAN-GP on a ring."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(*widths):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(2, 24, 24, 1)

    def penalty(self, real, fake, mix):
        x = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def forward(self, real, fake):
        return self.net(fake).mean() - self.net(real).mean()


def ring(n=192):
    g = torch.Generator().manual_seed(40)
    angle = 6.283 * torch.rand(n, generator=g)
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(points, torch.randn(n, 3, generator=g), torch.rand(n, 1, generator=g))


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = ring()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    generator, critic = DDP(mlp(3, 24, 2)), DDP(Critic())
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for real, latent, mix in loader:
            fake = generator(latent)
            c_optimizer.zero_grad()
            critic(real, fake.detach()).backward()
            (10 * critic.module.penalty(real, fake.detach(), mix)).backward()
            c_optimizer.step()
            g_optimizer.zero_grad()
            (-critic.module.net(fake).mean()).backward()
            g_optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
