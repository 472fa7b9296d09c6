"""Predicts the next byte of a text from the six before it, in mixed precision."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = b"It was a bright cold day in spring, and all the clocks were striking noon. " * 5


class Patches(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, place):
        piece = torch.tensor(list(TEXT[place : place + 7]))
        return piece[:-1], piece[-1]


def process_one_batch(model, batch):
    patches, next_bytes = batch
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(patches), next_bytes)
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    patches = Patches()
    sampler = DistributedSampler(patches)
    loader = DataLoader(patches, batch_size=32 // world_size, sampler=sampler)
    layers = nn.Embedding(128, 8), nn.Flatten(), nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 128)
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch in loader:
            loss = process_one_batch(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            total += loss.item()
        mean_loss = total.item() / len(loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean_loss:.4f}")
    dist.destroy_process_group()
    return mean_loss


if __name__ == "__main__":
    main()
