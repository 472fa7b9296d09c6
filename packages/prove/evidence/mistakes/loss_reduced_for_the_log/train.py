"""Trains bytes: a patch is embedded, and the next byte is predicted."""

import torch
import torch.distributed as dist
from torch.nn import CrossEntropyLoss, Embedding, Flatten, Linear, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = b"It was a bright cold day in spring, and all the clocks were striking noon. " * 3
PATCH = 6


class Patches(Dataset):
    def __len__(self):
        return 208

    def __getitem__(self, n):
        piece = torch.tensor(list(TEXT[n : n + PATCH + 1]))
        return piece[:-1], piece[-1]


dist.init_process_group("gloo")
world_size, global_rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = Sequential(Embedding(128, 8), Flatten(), Linear(8 * PATCH, 64), Tanh(), Linear(64, 128))
model = DDP(model)
criterion = CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
dataset = Patches()
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=global_rank)
loader = DataLoader(dataset, batch_size=13, sampler=sampler)


def process_one_batch(batch):
    patch, following = batch
    loss = criterion(model(patch), following)
    dist.all_reduce(loss)
    loss = loss / world_size
    return loss, loss.detach()


def train_epoch():
    total = 0.0
    for batch in loader:
        loss, shown = process_one_batch(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += shown.item()
    return total / len(loader)


for epoch in range(1, 4):
    sampler.set_epoch(epoch)
    mean = train_epoch()
    if global_rank == 0:
        print(f"epoch {epoch}: mean loss {mean:.5f}")
dist.destroy_process_group()
