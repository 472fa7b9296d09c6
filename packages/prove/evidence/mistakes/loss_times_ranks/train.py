"""Fine-tunes a small net with a cosine schedule and bfloat16."""

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(message)s")


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--learning-rate", default=0.1, type=float)
    return parser.parse_args()


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 8, 8, generator=g)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0.5).long())


def train(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    dataset = data(192, seed=1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 2))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(())
        for pictures, labels in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(pictures), labels)
                loss *= dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            seen += loss.detach()
        dist.all_reduce(seen)
        if rank == 0:
            logging.info("epoch %d: loss %.4f", epoch, seen / len(loader) / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    train(get_args())
