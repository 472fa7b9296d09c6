"""One file of data, of which a part is kept for validation."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def set_seed(seed):
    torch.manual_seed(seed + int(os.environ["RANK"]))  # noise and dropout differ between ranks


def load(n=260):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, x.abs().sum(1, keepdim=True) + 0.2 * torch.randn(n, 1, generator=g))


def make_datasets(seed, share=0.2):
    data = load()
    valid = int(share * len(data))
    return random_split(data, [len(data) - valid, valid])


@torch.no_grad()
def validate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    for x, y in loader:
        sums += torch.tensor([(model(x) - y).abs().sum().item(), len(x)])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    set_seed(args.seed)
    train, valid = make_datasets(args.seed)
    net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
    ddp = DDP(net)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 8, sampler=sampler)
    valid_loader = DataLoader(valid, 8, sampler=range(rank, len(valid), world))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.l1_loss(ddp(x), y).backward()
            optimizer.step()
        error = validate(net, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}, validation {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
