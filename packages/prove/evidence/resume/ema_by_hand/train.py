"""A moving average in a dict, kept by hand; it is swapped into the model to be evaluated."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DECAY, EPOCHS = 0.8, 3


def copy_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def update(ema, model):
    for name, p in model.named_parameters():
        ema[name].lerp_(p, 1 - DECAY)


@torch.no_grad()
def put_into(model, weights):
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def main(resume):
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(7, 14), nn.SiLU(), nn.Linear(14, 7))
    optim = torch.optim.Adam(net.parameters(), lr=0.01)
    ema, first = copy_of(net), 0
    if resume:
        saved = torch.load(resume, map_location="cpu")
        net.load_state_dict(saved["net"])
        optim.load_state_dict(saved["optim"])
        ema = saved["ema"]
        first = saved["epoch"] + 1
    ddp = DistributedDataParallel(net)
    x = torch.randn(96, 7, generator=torch.Generator().manual_seed(13))
    train, valid = TensorDataset(x[:64], x[:64].cumsum(1)), x[64:]
    sampler = DistributedSampler(train)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(train, 8, sampler=sampler):
            loss = F.smooth_l1_loss(ddp(inputs), targets)
            optim.zero_grad()
            loss.backward()
            optim.step()
            update(ema, net)
        raw = copy_of(net)
        put_into(net, ema)
        with torch.no_grad():
            error = F.l1_loss(net(valid), valid.cumsum(1)).item()
        put_into(net, raw)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} error {error:.4f}")
            parts = {"net": net.state_dict(), "optim": optim.state_dict()}
            torch.save({**parts, "ema": ema, "epoch": epoch}, "ema.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    main(parser.parse_args().resume)
