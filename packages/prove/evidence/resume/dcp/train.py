"""torch.distributed.checkpoint: all ranks write one folder, and read it into a model under DDP."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--load", metavar="FOLDER")
args = parser.parse_args()


def state_of(model, optimizer, epoch):
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state, "epoch": epoch}


def load(folder, model, optimizer):
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return state["epoch"]


dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(64, 10)
data = TensorDataset(points, points[:, :4].argmax(1))
ddp = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4)))
optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
first_epoch = load(args.load, ddp, optimizer) if args.load else 0
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(first_epoch, 3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
    dcp.save(state_of(ddp, optimizer, epoch + 1), checkpoint_id=f"saved/epoch_{epoch}")
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
