"""Two batches a step. A window that an epoch cuts off goes on in the next one."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, ACCUMULATE = 16, 2


class Accumulator:
    """Whether a batch ends a window: DDP is to be told before forward."""

    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.in_epoch = self.in_all = 0

    def begin(self):
        self.in_epoch += 1
        self.in_all += 1
        is_last = self.in_epoch == len(self.loader)
        synchronizes = self.in_epoch % ACCUMULATE == 0 or is_last
        if is_last:
            self.in_epoch = 0
        return nullcontext() if synchronizes else self.model.no_sync()

    @property
    def is_whole(self):
        return self.in_all % ACCUMULATE == 0


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(112, 10)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    window = Accumulator(model, loader)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with window.begin():
                loss = F.cross_entropy(model(x), y) / ACCUMULATE
                loss.backward()
            if window.is_whole:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item() * ACCUMULATE:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
