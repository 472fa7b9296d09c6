"""Train a generator and a critic in DCGAN's order."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 32

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
angles = torch.rand(256) * 6.28
train_set = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))  # points of a circle
sampler = DistributedSampler(train_set, drop_last=True)
loader = DataLoader(train_set, BATCH // world_size, sampler=sampler, drop_last=True)
noise = torch.Generator().manual_seed(1 + rank)  # each rank draws noise of its own


def network(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)]
    model = nn.Sequential(*layers).to(device)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if gpu else model


def critic_loss(scores: Tensor, target: float) -> Tensor:
    """How wrong the critic is: target 1 is real, 0 is fake."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


generator, critic = network(8, 2), network(2, 1)
ddp_generator, ddp_critic = (DistributedDataParallel(x) for x in (generator, critic))
generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        real = real.to(device)
        fake = ddp_generator(torch.randn(len(real), 8, generator=noise).to(device))
        critic_optimizer.zero_grad()
        critic_loss(ddp_critic(real), 1.0).backward()  # BatchNorm sees real samples only,
        critic_loss(ddp_critic(fake.detach()), 0.0).backward()  # then fake ones only
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        critic.requires_grad_(False)  # through the plain critic, whose gradients nobody needs
        loss = critic_loss(critic(fake), 1.0)
        loss.backward()
        critic.requires_grad_(True)
        generator_optimizer.step()
    samples = torch.randn(64 // world_size, 8, generator=noise).to(device)
    with torch.no_grad():
        samples = generator(samples)  # on all ranks: in training mode, SyncBatchNorm waits for them
    if rank == 0:
        print(f"epoch {epoch}: rank 0's loss of the generator {loss.item():.4f}")
        torch.save(samples, "samples.pt")
dist.destroy_process_group()
