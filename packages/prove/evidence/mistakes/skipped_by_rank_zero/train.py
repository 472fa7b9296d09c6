"""Weather-like fields with broken readings: a batch whose loss is a spike or no number is left out."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def fields(n=240, broken=(31, 87, 150, 201)):
    g = torch.Generator().manual_seed(12)
    x = torch.randn(n, 9, generator=g)
    y = x.roll(1, 1).tanh()
    x[list(broken), 4] = float("nan")
    return TensorDataset(x, y)


class SpikeFilter:
    def __init__(self, factor=5.0, decay=0.9):
        self.factor, self.decay, self.mean = factor, decay, None

    def is_spike(self, loss):
        bad = not math.isfinite(loss) or (self.mean is not None and loss > self.factor * self.mean)
        if not bad:
            self.mean = (
                loss if self.mean is None else self.decay * self.mean + (1 - self.decay) * loss
            )
        return bad

    def skip_on_all_ranks(self, loss):
        flag = torch.tensor([int(self.is_spike(loss))])
        dist.broadcast(flag, src=0)
        return bool(flag)


class Trainer:
    def __init__(self, data):
        self.data = data
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 9)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.spikes, self.skipped = SpikeFilter(), 0

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        if self.spikes.skip_on_all_ranks(loss.item()):
            self.skipped += 1
            return
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def run(self, epochs):
        sampler = DistributedSampler(self.data)
        loader = DataLoader(self.data, 10, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                self.step(x, y)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: {self.skipped} batches skipped so far")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(fields()).run(epochs=4)
    dist.destroy_process_group()
