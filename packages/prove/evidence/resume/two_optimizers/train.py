"""A generator and a critic, each with an optimizer of its own, in one checkpoint."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 4


def noise(x, step):
    """Return a latent vector for each sample, which depends on the step and the rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(len(x), LATENT, generator=generator)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--continue", dest="path", default=None)
    path = parser.parse_args().path
    dist.init_process_group("gloo")
    torch.manual_seed(100)
    generator = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g_optim = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    c_optim = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
    epoch = step = 0
    if path:
        saved = torch.load(path)
        generator.load_state_dict(saved["generator"])
        critic.load_state_dict(saved["critic"])
        g_optim.load_state_dict(saved["g_optim"])
        c_optim.load_state_dict(saved["c_optim"])
        epoch, step = saved["epoch"], saved["step"]
    g, c = DDP(generator), DDP(critic)
    angles = torch.rand(64, generator=torch.Generator().manual_seed(101)) * 6.283
    data = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    while epoch < 3:
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = g(noise(real, step))
            scores = c(torch.cat([real, fake.detach()]))
            wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            c_loss = F.binary_cross_entropy_with_logits(scores, wanted)
            c_optim.zero_grad()
            c_loss.backward()
            c_optim.step()
            critic.requires_grad_(False)
            g_loss = -F.logsigmoid(critic(fake)).mean()
            g_optim.zero_grad()
            g_loss.backward()
            g_optim.step()
            critic.requires_grad_(True)
            step += 1
        epoch += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: critic {c_loss.item():.3f}, generator {g_loss.item():.3f}")
            parts = dict(generator=generator, critic=critic, g_optim=g_optim, c_optim=c_optim)
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**saved, "epoch": epoch, "step": step}, "gan.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
