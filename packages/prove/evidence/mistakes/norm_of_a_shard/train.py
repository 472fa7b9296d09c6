"""Main weights in one flat vector, a shard on each rank, and gradients clipped before the step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, MAX_NORM = 16, 0.2


class ShardedMain:
    def __init__(self, params, lr):
        self.params, self.rank, self.world = list(params), dist.get_rank(), dist.get_world_size()
        whole = parameters_to_vector(self.params).detach()
        self.padding = -len(whole) % self.world
        self.main = self.shard(whole).clone().requires_grad_()
        self.optimizer = torch.optim.SGD([self.main], lr=lr, momentum=0.9)

    def shard(self, vector):
        return F.pad(vector, (0, self.padding)).chunk(self.world)[self.rank]

    def reduced_shard(self):
        """The mean of all ranks' gradients, for the part that is ours."""
        grad = torch.cat([p.grad.flatten() for p in self.params])
        dist.all_reduce(grad)
        return self.shard(grad / self.world)

    def step(self):
        self.main.grad = self.reduced_shard().clone()
        square = self.main.grad.square().sum()
        self.main.grad *= (MAX_NORM / (square.sqrt() + 1e-6)).clamp(max=1)
        self.optimizer.step()
        parts = [torch.empty_like(self.main.detach()) for _ in range(self.world)]
        dist.all_gather(parts, self.main.detach())
        whole = torch.cat(parts)
        vector_to_parameters(whole[: len(whole) - self.padding], self.params)
        for p in self.params:
            p.grad = None


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 10)
    data = TensorDataset(x, 5 * x[:, :2].prod(1, keepdim=True))
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = ShardedMain(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
