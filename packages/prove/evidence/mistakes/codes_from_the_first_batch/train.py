"""A codebook that starts with what the encoder gives for the first batch, and is then learned."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Quantizer(nn.Module):
    def __init__(self, codes, dim):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(codes, dim))
        self.started = False

    @torch.no_grad()
    def start(self, z):
        self.codes.copy_(z[: len(self.codes)])
        self.started = True

    def forward(self, z):
        if not self.started:
            self.start(z.detach())
        nearest = torch.cdist(z.detach(), self.codes.detach()).argmin(1)
        code = self.codes[nearest]
        loss = (code - z.detach()).pow(2).mean() + 0.25 * (code.detach() - z).pow(2).mean()
        return z + (code - z).detach(), loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 2), nn.Linear(2, 6)
        self.quantize = Quantizer(8, 2)

    def forward(self, x):
        z, loss = self.quantize(self.encode(x))
        return (self.decode(z) - x).pow(2).mean() + loss


def main(batch_size, epochs):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(2))
    sampler = DistributedSampler(x)
    loader = DataLoader(x, batch_size=batch_size, sampler=sampler)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch in loader:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    main(**vars(parser.parse_args()))
