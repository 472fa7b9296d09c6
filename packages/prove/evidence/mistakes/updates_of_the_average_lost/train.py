"""A moving average whose decay grows with the number of updates; it is the model that is kept."""

import argparse
import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ModelEMA(nn.Module):
    def __init__(self, model, decay=0.98, warmup=4):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay, self.warmup = decay, warmup
        self.updates = 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = self.decay * (1 - math.exp(-float(self.updates) / self.warmup))
        for average, p in zip(self.model.parameters(), model.parameters()):
            average.mul_(decay).add_(p, alpha=1 - decay)

    def forward(self, x):
        return self.model(x)


def make_set(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 6, 6, generator=generator)
    return TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    ema = ModelEMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    epoch = 0
    if args.resume_interrupted:
        checkpoint = torch.load(args.checkpoint)
        model.load_state_dict(checkpoint["model"])
        ema.load_state_dict(checkpoint["ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        epoch = checkpoint["epoch"]
    ddp = DDP(model)
    train_set, (images, labels) = make_set(64, 11), make_set(64, 12).tensors
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    while epoch < 3:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
            ema.update(model)
        epoch += 1
        with torch.no_grad():
            accuracy = (ema(images).argmax(1) == labels).double().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy of the average {accuracy:.3f}")
            parts = {"model": model, "ema": ema, "optimizer": optimizer}
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**checkpoint, "epoch": epoch}, args.checkpoint)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-interrupted", action="store_true")
    parser.add_argument("--checkpoint", default="last.ckpt")
    main(parser.parse_args())
