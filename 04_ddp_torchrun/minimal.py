"""The same for many GPUs: torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/minimal.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":  # a GPU for each process: from here on, "cuda" is mine
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # my number on this machine
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # meet the other processes
rank, world_size = dist.get_rank(), dist.get_world_size()  # my number, and how many there are
torch.manual_seed(0)
inputs = torch.randn(6000, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)  # 10 classes that can be learned
train_set = TensorDataset(inputs[:5000], labels[:5000])
test_set = TensorDataset(inputs[5000:], labels[5000:])
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
ddp = DistributedDataParallel(model)  # averages gradients in backward; model itself is saved
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
local_batch = 120 // world_size  # 120 samples per step, all ranks together
sampler = DistributedSampler(train_set)  # deals the samples out to the ranks
loader = DataLoader(train_set, batch_size=local_batch, sampler=sampler)
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=120)

for epoch in range(5):
    sampler.set_epoch(epoch)  # a new order in each epoch, the same on all ranks
    for x, y in loader:
        loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    correct = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in test_loader:
            correct += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
    dist.all_reduce(correct)  # each rank has counted its own test samples
    if rank == 0:
        print(f"epoch {epoch}: {correct.item() / len(test_set):.1%} of {len(test_set)} right")
        torch.save(model.state_dict(), "model.pt")
del ddp  # before the group: otherwise, the exit may hang (gloo)
dist.destroy_process_group()
