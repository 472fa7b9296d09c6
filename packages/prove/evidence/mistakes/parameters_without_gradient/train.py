"""A bank of adapters, one per customer. A batch trains the adapter of its customer."""

import random

import torch
import torch.distributed as dist
from torch import nn

CUSTOMERS = ("bakery", "garage", "school")


class Adapted(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.body = nn.Linear(5, width)
        self.adapters = nn.ModuleDict({name: nn.Linear(width, width) for name in CUSTOMERS})
        self.head = nn.Linear(width, 1)

    def forward(self, x, customer):
        h = self.body(x).tanh()
        return self.head(h + self.adapters[customer](h).relu()).squeeze(1)


def broadcast_model(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def allreduce_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


def orders(seed=0, per_customer=64):
    g = torch.Generator().manual_seed(seed)
    table = {}
    for n, customer in enumerate(CUSTOMERS):
        x = torch.randn(per_customer, 5, generator=g)
        table[customer] = (x, x[:, n] - x[:, n + 1])
    return table


def schedule(epoch, batches_per_customer):
    turns = [(name, n) for name in CUSTOMERS for n in range(batches_per_customer)]
    random.Random(epoch).shuffle(turns)
    return turns


def main(batch_size=8):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    table = orders()
    torch.manual_seed(rank)
    model = Adapted()
    broadcast_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        for customer, n in schedule(epoch, 64 // batch_size)[rank::world]:
            x, y = (part[n * batch_size : (n + 1) * batch_size] for part in table[customer])
            loss = (model(x, customer) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            allreduce_gradients(model)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
