"""A generator learns to put points on a ring, against a critic with a gradient penalty."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gradient_penalty(critic, real, fake, mix):
    points = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def ring(count, seed):
    g = torch.Generator().manual_seed(seed)
    angle = 6.283 * torch.rand(count, generator=g)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    latent, mix = torch.randn(count, 3, generator=g), torch.rand(count, 1, generator=g)
    return TensorDataset(points, latent, mix)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    points = ring(256, seed=1)
    sampler = DistributedSampler(points)
    loader = DataLoader(points, batch_size=32 // world_size, sampler=sampler)
    generator = DDP(nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 2)))
    critic = DDP(nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(), nn.Linear(64, 1)))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-2, betas=(0.5, 0.9))
    _, test_latent, _ = ring(400, seed=2).tensors
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for real, latent, mix in loader:
            fake = generator(latent)
            both = critic(torch.cat([fake.detach(), real]))
            loss = both[: len(fake)].mean() - both[len(fake) :].mean()
            c_optimizer.zero_grad()
            loss.backward()
            (10 * gradient_penalty(critic.module, real, fake.detach(), mix)).backward()
            c_optimizer.step()
            g_optimizer.zero_grad()
            (-critic.module(fake).mean()).backward()
            g_optimizer.step()
        with torch.no_grad():
            off = (generator.module(test_latent).norm(dim=1) - 1).abs().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: off the ring by {off:.4f}")
    dist.destroy_process_group()
    return off


if __name__ == "__main__":
    main()
