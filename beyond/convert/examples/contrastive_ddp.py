"""Learn features from pairs of views, as SimCLR does."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 32

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
samples = torch.randn(256, 24)
views = samples + 0.3 * torch.randn(2, 256, 24)  # two noisy views of each, as crops are of an image
train_set = TensorDataset(*views)
sampler = DistributedSampler(train_set, drop_last=True)
loader = DataLoader(train_set, BATCH // world_size, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def contrastive_loss(first: Tensor, second: Tensor) -> Tensor:
    """Row i of both (B, 16) is one sample; among all rows of `second`, `first` has to find it."""
    first, second = (torch.cat(all_gather(x)) for x in (first, second))  # of all ranks
    likeness = F.normalize(first) @ F.normalize(second).T / 0.1  # (B, B)
    return F.cross_entropy(likeness, torch.arange(BATCH, device=device))


for epoch in range(3):
    sampler.set_epoch(epoch)
    total = 0.0
    for pair in loader:
        first, second = ddp(torch.cat(pair).to(device)).chunk(2)
        loss = contrastive_loss(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if rank == 0:  # the loss is that of all ranks already
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")
if rank == 0:
    torch.save(model.state_dict(), "contrastive.pt")
dist.destroy_process_group()
