"""A Fourier layer with complex weights. The gradients travel in one flat buffer."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LENGTH, MODES, GLOBAL_BATCH = 16, 5, 16


class Spectral(nn.Module):
    def __init__(self, width):
        super().__init__()
        shape = width, width, MODES
        self.weight = nn.Parameter(torch.complex(torch.randn(shape), torch.randn(shape)) / width)

    def forward(self, x):
        waves = torch.fft.rfft(x)
        mixed = torch.zeros_like(waves)
        mixed[..., :MODES] = torch.einsum("bim,iom->bom", waves[..., :MODES], self.weight)
        return torch.fft.irfft(mixed, n=LENGTH)


class Operator(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.lift, self.spectral = nn.Conv1d(1, width, 1), Spectral(width)
        self.local, self.project = nn.Conv1d(width, width, 1), nn.Conv1d(width, 1, 1)

    def forward(self, x):
        h = self.lift(x)
        return self.project(F.gelu(self.spectral(h) + self.local(h)))


def average_gradients(params, world):
    grads = [p.grad for p in params]
    flat = torch.cat([grad.real.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= world
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(96, 1, LENGTH)
    data = TensorDataset(x, x.roll(2, -1) + x.roll(-1, -1))
    model = Operator()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    loader = DataLoader(data, GLOBAL_BATCH // world, sampler=DistributedSampler(data))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(params, world)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
