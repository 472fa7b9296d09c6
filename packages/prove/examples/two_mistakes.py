"""A script that runs on any number of ranks, prints a falling loss, and has two mistakes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 12

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
points = torch.randn(96, 6)
labels = (points[:, 0] > 0.5).long() + (points[:, 1] > 1.0)  # three classes, one of them rare
dataset = TensorDataset(points, labels)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, GLOBAL_BATCH // world_size, sampler=sampler)

net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
ddp = DistributedDataParallel(net)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
class_weights = torch.tensor([1.0, 3.0, 9.0])
torch.manual_seed(rank)  # otherwise all ranks would draw the same dropout masks

for epoch in range(5):
    total = torch.zeros(())
    for x, y in loader:
        loss = F.cross_entropy(ddp(x), y, weight=class_weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}  loss {total.item() / len(loader) / world_size:.3f}")
dist.destroy_process_group()
