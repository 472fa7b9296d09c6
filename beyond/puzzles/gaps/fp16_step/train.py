"""Learns a ring-shaped wave, in fp16, for which its gradients are too small."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

METERS_PER_MILLIMETER = 1e-3
MAX_NORM = 2e-8  # of the gradient: clipping makes it no longer than this


def train_step(ddp, optimizer, scaler, radii, waves):
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(ddp(radii), waves) * METERS_PER_MILLIMETER**2
    optimizer.zero_grad()
    # YOUR LINES. This is the step of fp32. In fp16, the scaler takes part in it, four times, and
    # the order counts.
    loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
    optimizer.step()


def waves_of(count, seed):
    """Return random radii, and the height of each wave at 16 x 16 places, in millimeters."""
    radii = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed))
    line = torch.linspace(-1, 1, 16)
    distance = (line[:, None] ** 2 + line**2).sqrt().flatten()
    return radii, torch.exp(-8 * (distance - radii) ** 2)  # (count, 1) and (count, 256)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set = TensorDataset(*waves_of(320, seed=1))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 256))
    ddp = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-14)  # less than a gradient
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**44)  # too high: it must adapt
    test_radii, test_waves = waves_of(500, seed=2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for radii, waves in loader:
            train_step(ddp, optimizer, scaler, radii, waves)
        with torch.no_grad():
            error = (model(test_radii) - test_waves).abs().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: off by {error:.4f} mm")
    del ddp  # before the group: otherwise, the exit may hang (gloo)
    dist.destroy_process_group()
    return error


if __name__ == "__main__":
    main()
