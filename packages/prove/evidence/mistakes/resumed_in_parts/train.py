"""Each rank steps the layers that it owns and saves them. A run that is resumed goes on from there."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16


class LayerOwners:
    """Momentum on a main copy of each parameter, which lies on the rank that owns it."""

    def __init__(self, model, lr=0.1):
        self.params, self.lr = list(model.parameters()), lr
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        own = range(self.rank, len(self.params), self.world)
        self.main = {i: self.params[i].detach().clone() for i in own}
        self.velocity = {i: torch.zeros_like(main) for i, main in self.main.items()}

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.params):
            dist.all_reduce(p.grad)
            if i in self.main:
                self.velocity[i].mul_(0.9).add_(p.grad / self.world)
                self.main[i].sub_(self.velocity[i], alpha=self.lr)
            p.grad = None
        self.copy_main()
        self.sync()

    def copy_main(self):
        for i, main in self.main.items():
            self.params[i].data.copy_(main)

    def sync(self):
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, src=i % self.world)

    def save(self):
        torch.save({"main": self.main, "velocity": self.velocity}, f"part{self.rank}.pt")

    def load(self):
        saved = torch.load(f"part{self.rank}.pt")
        self.main, self.velocity = saved["main"], saved["velocity"]
        self.copy_main()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    return model, LayerOwners(model)


def train(epochs, data, is_resumed):
    model, optimizer = build()
    if is_resumed:
        optimizer.load()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    optimizer.save()
    print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    points = torch.randn(96, 10, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(points, points[:, :3].argmax(1))
    train(range(2), samples, is_resumed=False)
    train(range(2, 4), samples, is_resumed=True)
    dist.destroy_process_group()
