"""The scripts that several tests of prove change."""

from pathlib import Path

from evidence.changes import replace_once
from evidence.planted import right_script

PACKAGE = Path(__file__).parents[1]


def planted(*changes: tuple[str, str]) -> str:
    """Return the plain script with these lines replaced."""
    return replace_once(right_script("plain"), *changes)


def training_of(model: str, classes: str = "") -> str:
    """Write a script that trains this model on 32 samples of 5 × 8, in global batches of 8."""
    return f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
{classes}
dist.init_process_group("gloo")
torch.manual_seed(0)
data, local_batch = torch.randn(32, 5, 8), 8 // dist.get_world_size()
model = {model}
optimizer, sampler = torch.optim.SGD(model.parameters(), 0.1), DistributedSampler(data)
torch.manual_seed(dist.get_rank())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, local_batch, sampler=sampler):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
