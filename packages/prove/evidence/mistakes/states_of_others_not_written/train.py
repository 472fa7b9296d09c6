"""A router adds noise to its logits, drawn from a generator that each rank has seeded for itself."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FOLDER = Path("megatron")


class Router(nn.Module):
    def __init__(self, width, experts, generator):
        super().__init__()
        self.scores = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.generator = generator

    def forward(self, x):
        scores = self.scores(x)
        scores = scores + torch.randn(scores.shape, generator=self.generator)
        shares = scores.softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * shares.unsqueeze(-2)).sum(-1)


class Checkpoint:
    """Parts that are the same on all ranks are written once."""

    def __init__(self):
        self.rank = dist.get_rank()

    def path(self, name, replicated):
        return FOLDER / (f"{name}.pt" if replicated else f"{name}_{self.rank}.pt")

    def write(self, name, value, replicated=True):
        FOLDER.mkdir(exist_ok=True)
        if self.rank == 0 or not replicated:
            torch.save(value, self.path(name, replicated))

    def read(self, name, replicated=True):
        return torch.load(self.path(name, replicated))


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(13)
    generator = torch.Generator().manual_seed(1024 + 100 * dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 12), Router(12, 3, generator), nn.Linear(12, 2))
    ddp = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    checkpoint, epoch = Checkpoint(), 0
    if args.load:
        model.load_state_dict(checkpoint.read("model"))
        optimizer.load_state_dict(checkpoint.read("optimizer"))
        generator.set_state(checkpoint.read("rng"))
        epoch = checkpoint.read("epoch")
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(14))
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    while epoch < 3:
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        epoch += 1
        checkpoint.write("model", model.state_dict())
        checkpoint.write("optimizer", optimizer.state_dict())
        checkpoint.write("rng", generator.get_state())
        checkpoint.write("epoch", epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", action="store_true")
    main(parser.parse_args())
