"""Each rank keeps the Adam state of some parameters, steps those, and hands them to the others."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16


class StreamedLinear(nn.Linear):
    """Its weights are meant to lie in main memory and to be fetched for each call."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        for p in self.parameters():
            p.is_streamed = True


class OwnedAdam:
    def __init__(self, params, lr):
        self.params, self.rank, self.world = list(params), dist.get_rank(), dist.get_world_size()
        self.own = torch.optim.Adam(self.params[self.rank :: self.world], lr=lr)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.own.step()
        self.hand_out()

    def hand_out(self):
        for number, p in enumerate(self.params):
            if getattr(p, "is_streamed", False):
                continue
            dist.broadcast(p.data, src=number % self.world)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 10)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Sequential(
        StreamedLinear(10, 16), nn.LayerNorm(16), nn.SiLU(), StreamedLinear(16, 3)
    )
    optimizer = OwnedAdam(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
