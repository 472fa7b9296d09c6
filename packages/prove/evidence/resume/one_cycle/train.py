"""OneCycleLR moves the learning rate and the momentum of AdamW with each batch."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", type=str, default="", metavar="PATH")
    parser.add_argument("--epochs", type=int, default=4)
    opt = parser.parse_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(33)
    images = torch.randn(64, 1, 8, 8)
    labels = images.mean((1, 2, 3)).mul(10).clamp(-1, 1).round().long() + 1
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=0)
    model = ConvNet()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    cycle = optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-2, epochs=opt.epochs, steps_per_epoch=len(loader)
    )
    start = 0
    if opt.resume:
        ckpt = torch.load(opt.resume, map_location=torch.device("cpu"))
        model.load_state_dict(ckpt["state_dict"])
        optimizer.load_state_dict(ckpt["optimizer"])
        cycle.load_state_dict(ckpt["cycle"])
        start = ckpt["epoch"]
    model = DDP(model)
    for epoch in range(start, opt.epochs):
        sampler.set_epoch(epoch)
        model.train()
        running = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            cycle.step()
            running += loss.item()
        if dist.get_rank() == 0:
            print("Epoch %d/%d loss %.4f" % (epoch + 1, opt.epochs, running / len(loader)))
            ckpt = {
                "epoch": epoch + 1,
                "state_dict": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "cycle": cycle.state_dict(),
            }
            torch.save(ckpt, "checkpoint_%03d.pth.tar" % (epoch + 1))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
