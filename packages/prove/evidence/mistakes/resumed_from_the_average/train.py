"""Callbacks around an epoch: one keeps a moving average, another one writes the checkpoint."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Average:
    """Swaps its weights with those of the model for the time of the validation."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.raw = None

    @torch.no_grad()
    def on_batch_end(self):
        for average, p in zip(self.weights, self.model.parameters()):
            average.mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self):
        self.raw = [p.detach().clone() for p in self.model.parameters()]
        for average, p in zip(self.weights, self.model.parameters()):
            p.copy_(average)

    @torch.no_grad()
    def on_train_start(self):
        for raw, p in zip(self.raw or [], self.model.parameters()):
            p.copy_(raw)

    def state_dict(self):
        return {"weights": self.weights, "raw": self.raw}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def validate(model, data):
    with torch.no_grad():
        inputs, targets = data.tensors
        return nn.functional.mse_loss(model(inputs), targets).item()


def fit(ckpt_path):
    torch.manual_seed(9)
    x = torch.randn(96, 5)
    y = torch.stack([x.sum(1), x.abs().sum(1)], 1)
    train_set, validation_set = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    model = nn.Sequential(nn.Linear(5, 25), nn.Tanh(), nn.Linear(25, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    average, first_epoch = Average(model), 0
    if ckpt_path:
        state = torch.load(ckpt_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.load_state_dict(state["average"])
        first_epoch = state["epoch"] + 1
    ddp = DDP(model)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    for epoch in range(first_epoch, 4):
        sampler.set_epoch(epoch)
        average.on_train_start()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
            average.on_batch_end()
        average.on_validation_start()
        error = validate(model, validation_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation {error:.4f}")
            parts = {"model": model, "optimizer": optimizer, "average": average}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch}, f"epoch={epoch}.ckpt")
        dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ckpt-path")
    dist.init_process_group("gloo")
    fit(parser.parse_args().ckpt_path)
    dist.destroy_process_group()
