"""A vector-quantized autoencoder whose codebook follows the encoder by a moving average."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, one_hot
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Codebook(nn.Module):
    def __init__(self, codes=12, dim=3, decay=0.8):
        super().__init__()
        self.decay = decay
        start = torch.randn(codes, dim)
        self.register_buffer("embed", start)
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("sum", start.clone())

    @torch.no_grad()
    def follow(self, z, chosen):
        hot = one_hot(chosen, len(self.embed)).to(z.dtype)
        size, total = hot.sum(0), hot.T @ z
        self.size.lerp_(size, 1 - self.decay)
        self.sum.lerp_(total, 1 - self.decay)
        self.embed.copy_(self.sum / self.size.clamp(min=1e-3)[:, None])

    def forward(self, z):
        chosen = torch.cdist(z, self.embed).argmin(1)
        quantized = self.embed[chosen].clone()
        if self.training:
            self.follow(z, chosen)
        commitment = mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 10))

    def forward(self, x):
        z, commitment = self.codebook(self.encoder(x))
        return self.decoder(z), commitment


def fit(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x in loader:
            output, commitment = model(x)
            loss = mse_loss(output, x) + 0.25 * commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sounds = torch.randn(176, 10, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(sounds, batch_size=8, sampler=DistributedSampler(sounds))
    model = DDP(VQVAE())
    fit(model, loader, torch.optim.Adam(model.parameters(), lr=2e-3), epochs=3)
    dist.destroy_process_group()
