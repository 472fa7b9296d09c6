"""A small physics fit with L-BFGS: u'' = -u on an interval, whole shards at once."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)
        )

    def forward(self, t):
        t = t.requires_grad_()
        u = self.net(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        start = self.net(torch.zeros(1, 1)) - 1
        return (ddu + u).square().mean() + start.square().mean()


def solve(ddp, loader, epochs):
    optimizer = torch.optim.LBFGS(
        ddp.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    )
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for t in loader:

            def closure():
                optimizer.zero_grad()
                loss = ddp(t)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {float(loss):.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    times = torch.linspace(0, 4, 64).unsqueeze(1)
    loader = DataLoader(times, batch_size=8, sampler=DistributedSampler(times))
    solve(DDP(Wave()), loader, epochs=3)
    dist.destroy_process_group()
