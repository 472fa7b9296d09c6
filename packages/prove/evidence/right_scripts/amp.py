"""A small usual script: BatchNorm, autocast with GradScaler, clipping, saving, resuming."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

CHECKPOINT = "amp.pt"


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(2, (count,), generator=generator)
    pictures = torch.randn(count, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1)
    return TensorDataset(pictures, labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.output = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    random.seed(rank)
    generator = torch.Generator().manual_seed(1)
    train_set, test_set = random_split(images(120), [96, 24], generator=generator)
    model = Net()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sampler = DistributedSampler(train_set, seed=0, drop_last=True)
    loader = DataLoader(train_set, batch_size=24 // world_size, sampler=sampler)
    test_sampler = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, batch_size=4, sampler=test_sampler)
    first = 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    for epoch in range(first, first + 3):
        sampler.set_epoch(epoch)
        ddp.train()
        for pictures, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(ddp(pictures), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        totals = torch.zeros(2)
        with torch.no_grad():
            for pictures, labels in test_loader:
                totals += torch.tensor([(model(pictures).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {totals[0] / totals[1]:.4f}")
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch + 1, **parts}, CHECKPOINT)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
