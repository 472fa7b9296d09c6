"""Layouts of boxes by an adversarial network: a generator, and a critic that judges them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH = 16


class Layouts(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        corner, size = torch.rand(2, generator=g), 0.3 * torch.rand(2, generator=g)
        return torch.cat([corner, corner + size]), torch.randn(4, generator=g)


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 24), nn.LeakyReLU(0.2), nn.Linear(24, outputs))


class Trainer:
    def __init__(self):
        self.models = {"generator": DDP(mlp(4, 4)), "critic": mlp(4, 1)}
        self.optimizers = {
            name: torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.5, 0.99))
            for name, model in self.models.items()
        }

    def update(self, name, loss):
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()
        return loss.item()

    def step(self, real, noise):
        generator, critic = self.models["generator"], self.models["critic"]
        fake = generator(noise)
        on_real, on_fake = critic(torch.cat([real, fake.detach()])).chunk(2)
        judged = self.update("critic", F.softplus(-on_real).mean() + F.softplus(on_fake).mean())
        fooled = self.update("generator", F.softplus(-critic(fake)).mean())
        return judged, fooled


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    trainer, data = Trainer(), Layouts()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for real, noise in loader:
            losses = trainer.step(real.to(torch.get_default_dtype()), noise)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: critic {losses[0]:.3f}, generator {losses[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
