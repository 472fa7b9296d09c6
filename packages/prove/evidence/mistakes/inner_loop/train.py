"""First-order in the inner loop, second-order outside: MAML over sine waves, with torch.func."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class SineTasks(Dataset):
    def __init__(self, tasks=96, shots=6):
        self.tasks, self.shots = tasks, shots

    def __len__(self):
        return self.tasks

    def __getitem__(self, task):
        g = torch.Generator().manual_seed(task)
        height, shift = 1 + torch.rand(1, generator=g), math.pi * torch.rand(1, generator=g)
        x = 6 * torch.rand(2, self.shots, 1, generator=g) - 3
        return x, height * (x + shift).sin()


net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))


def mse(weights, x, y):
    return (functional_call(net, weights, (x,)) - y).square().mean()


def after_adapting(weights, x, y, rate=0.05):
    slopes = grad(mse)(weights, x[0], y[0])
    adapted = {name: weights[name] - rate * slopes[name] for name in weights}
    return mse(adapted, x[1], y[1])


def outer_loss(weights, x, y):
    return vmap(after_adapting, in_dims=(None, 0, 0))(weights, x, y).mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weights = {name: torch.randn_like(p) * 0.4 for name, p in net.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in weights.items()}
    tasks = SineTasks()
    sampler = DistributedSampler(tasks)
    loader = DataLoader(tasks, batch_size=4, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            slopes = grad(outer_loss)(weights, x, y)
            for name in weights:
                velocity[name] = 0.9 * velocity[name] + slopes[name]
                weights[name] = weights[name] - 0.01 * velocity[name]
    total = sum(w.abs().sum().item() for w in weights.values())
    print(f"rank {dist.get_rank()}: sum of the weights {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
