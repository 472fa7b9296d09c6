"""LambdaLR: six steps of warm-up, then a decay, stepped after each batch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WARMUP, TOTAL = 6, 24


def factor(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return max(0.05, (TOTAL - step) / (TOTAL - WARMUP))


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="warm.pt")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lr", type=float, default=0.3)
    return parser.parse_args()


def train(args):
    torch.manual_seed(21)
    x = torch.randn(64, 4)
    data = TensorDataset(x, torch.stack([x.sin().sum(1), x.prod(1)], 1))
    net = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
    scheduler = LambdaLR(optimizer, factor)
    epoch = 0
    if args.resume:
        state = torch.load(args.checkpoint)
        net.module.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        epoch = state["epoch"]
    sampler = DistributedSampler(data, seed=21)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    while epoch < 6:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        epoch += 1
        if dist.get_rank() == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"{epoch} epochs done, loss {loss.item():.4f}, next lr {lr:.5f}", flush=True)
            state = dict(weights=net.module.state_dict(), optimizer=optimizer.state_dict())
            state |= dict(scheduler=scheduler.state_dict(), epoch=epoch)
            torch.save(state, args.checkpoint)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(get_args())
    dist.destroy_process_group()
