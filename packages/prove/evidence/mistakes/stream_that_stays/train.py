"""Tar-like shards, opened by workers that live as long as the loader."""

import os

import torch
import torch.distributed as dist
from torch.nn import GELU, Linear, Sequential
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ShardReader(IterableDataset):
    def __init__(self, shards, rank, world_size):
        self.shards, self.rank, self.world_size = shards, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        g = torch.Generator()
        g.manual_seed(1000 + int(self.epoch))
        order = torch.randperm(len(self.shards), generator=g).tolist()
        readers = self.world_size * worker.num_workers
        for number in order[self.rank * worker.num_workers + worker.id :: readers]:
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(self.shards[number]))
            for row in torch.randperm(16, generator=g).tolist():
                yield x[row], x[row].prod()


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world_size)
torch.manual_seed(0)
reader = ShardReader(list(range(500, 516)), rank, world_size)
loader = DataLoader(reader, batch_size=8, num_workers=2, persistent_workers=True)
model = DDP(Sequential(Linear(6, 32), GELU(), Linear(32, 1)))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for epoch in range(3):
    reader.set_epoch(epoch)
    losses = []
    for x, y in loader:
        loss = (model(x).squeeze(-1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    if rank == 0:
        print(epoch, f"{mean.item() / world_size:.4f}")
dist.destroy_process_group()
