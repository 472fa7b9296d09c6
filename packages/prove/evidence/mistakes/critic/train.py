"""A critic with a gradient penalty learns how far two rings of points are apart."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gradient_penalty(critic, inner, outer, mix):
    points = (mix * inner + (1 - mix) * outer).requires_grad_()
    (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def rings(count, seed):
    g = torch.Generator().manual_seed(seed)
    angle = 6.283 * torch.rand(2, count, generator=g)
    inner, outer = torch.stack([angle.cos(), angle.sin()], dim=2)
    return TensorDataset(inner, 2 * outer, torch.rand(count, 1, generator=g))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    points = rings(256, seed=1)
    sampler = DistributedSampler(points)
    loader = DataLoader(points, batch_size=4 // world_size, sampler=sampler)
    critic = DDP(nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-2)
    test_inner, test_outer, _ = rings(400, seed=2).tensors
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inner, outer, mix in loader:
            both = critic(torch.cat([inner, outer]))
            loss = both[: len(inner)].mean() - both[len(inner) :].mean()
            optimizer.zero_grad()
            loss.backward()
            (10 * gradient_penalty(critic.module, inner, outer, mix)).backward()
            optimizer.step()
        with torch.no_grad():
            apart = (critic.module(test_outer).mean() - critic.module(test_inner).mean()).item()
        error = abs(apart - 1)  # the radii are 1 and 2
        if rank == 0:
            print(f"epoch {epoch}: {apart:.3f} apart, wrong by {error:.4f}")
    dist.destroy_process_group()
    return error


if __name__ == "__main__":
    main()
