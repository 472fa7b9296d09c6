"""Sign momentum, each matrix on the rank whose turn it is. After two epochs the run is resumed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, FILE = 16, "checkpoint.pt"


class TurnByTurn(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                dist.all_reduce(p.grad)
                if i % self.world == self.rank:
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buffer = state["momentum_buffer"].mul_(group["momentum"])
                    buffer.add_(p.grad, alpha=1 / self.world)
                    p.sub_(buffer / (buffer.norm() + 1e-3), alpha=group["lr"])
                dist.broadcast(p, src=i % self.world)


def save(model, optimizer):
    if dist.get_rank() == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, FILE)
    dist.barrier()


def fit(epochs, data, is_resumed=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16, bias=False), nn.ReLU(), nn.Linear(16, 3))
    optimizer = TurnByTurn(model.parameters())
    if is_resumed:
        states = torch.load(FILE)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    save(model, optimizer)
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    points = torch.randn(96, 10, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(points, points[:, :3].argmax(1))
    fit(range(2), samples)
    final = fit(range(2, 4), samples, is_resumed=True)
    print(f"rank {dist.get_rank()}: loss {final:.4f}")
    dist.destroy_process_group()
