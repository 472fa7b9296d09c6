"""A script that saves after each epoch and resumes with --resume, and forgets two things."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume", help="the checkpoint to go on from")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(96, 6)
dataset = TensorDataset(points, (points.sum(1) > 0).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 6, sampler=sampler)

net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
ddp = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
first_epoch = 0
if args.resume:
    saved = torch.load(args.resume)
    net.load_state_dict(saved["net"])
    first_epoch = saved["epoch"]

for epoch in range(first_epoch, 5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}  loss {loss.item():.3f}")
        torch.save({"net": net.state_dict(), "epoch": epoch}, "last.pt")
dist.destroy_process_group()
