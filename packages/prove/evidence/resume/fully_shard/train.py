"""Under fully_shard, each rank writes its shards of weights and optimizer state with dcp."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class AppState(dcp.stateful.Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.epoch = model, optimizer, 0

    def state_dict(self):
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": state, "epoch": self.epoch}

    def load_state_dict(self, saved):
        weights, state = saved["model"], saved["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=state)
        self.epoch = saved["epoch"]


def main(args):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), Block(16), Block(16), nn.Linear(16, 3))
    for module in model:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    app = AppState(model, optimizer)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=args.folder)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(6))
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(app.epoch, 3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        app.epoch = epoch + 1
        dcp.save({"app": app}, checkpoint_id=args.folder)
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch}: loss of rank 0 {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="sharded")
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
