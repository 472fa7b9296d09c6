"""One dict with everything, which rank 0 writes after each epoch; --resume takes its path."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
x = torch.randn(96, 8)
train_set = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
ddp = DDP(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
start_epoch = 0
if args.resume:
    checkpoint = torch.load(args.resume, map_location="cpu")
    ddp.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start_epoch = checkpoint["epoch"] + 1

sampler = DistributedSampler(train_set, shuffle=True)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
for epoch in range(start_epoch, args.epochs):
    sampler.set_epoch(epoch)
    total = 0.0
    for inputs, labels in loader:
        loss = F.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if rank == 0:
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
        state = {
            "model": ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
        }
        torch.save(state, "last.pt")
    dist.barrier()
dist.destroy_process_group()
