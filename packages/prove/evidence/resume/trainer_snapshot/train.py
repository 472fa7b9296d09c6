"""A Trainer with a snapshot, from which it goes on by itself whenever the file exists."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, loader, optimizer, path):
        self.rank = int(os.environ["RANK"])
        self.model, self.loader, self.optimizer = model, loader, optimizer
        self.path, self.next_epoch = path, 0
        if os.path.exists(path):
            self.load()
        self.ddp = DDP(self.model)

    def load(self):
        snapshot = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(snapshot["weights"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.next_epoch = snapshot["next_epoch"]
        print(f"[rank {self.rank}] goes on with epoch {self.next_epoch}")

    def save(self, epoch):
        snapshot = {
            "weights": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "next_epoch": epoch + 1,
        }
        torch.save(snapshot, self.path)

    def run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.ddp(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, epochs):
        for epoch in range(self.next_epoch, epochs):
            self.loader.sampler.set_epoch(epoch)
            losses = [self.run_batch(inputs, targets) for inputs, targets in self.loader]
            if self.rank == 0:
                print(f"epoch {epoch}: loss {sum(losses) / len(losses):.5f}")
                self.save(epoch)
            dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    inputs = torch.randn(80, 6)
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, "snapshot.pt").train(epochs=4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
