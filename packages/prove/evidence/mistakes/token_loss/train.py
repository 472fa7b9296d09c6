"""Trains a small language model on sentences of any length, so that each token counts alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

IGNORE = -100


def sentences(count, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.where(torch.rand(count, generator=g) < 0.5, 3, 25).tolist()
    steps = [torch.full((n,), 1 if n == 3 else 2) for n in lengths]  # short ones count 1, 2, 3
    return [step.cumsum(0) % 17 for step in steps]


def collate(batch):
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=IGNORE)
    return ids[:, :-1], labels[:, 1:].flatten()


def token_losses(model, ids, labels):
    scores = model(ids).flatten(0, 1)
    return F.cross_entropy(scores, labels, ignore_index=IGNORE, reduction="sum")


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = sentences(128, seed=1), sentences(200, seed=2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 8 // world_size, sampler=sampler, collate_fn=collate)
    ddp = DDP(nn.Sequential(nn.Embedding(17, 12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 17)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    test_ids, test_labels = collate(test_set)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids, labels in loader:
            optimizer.zero_grad()
            tokens = (labels != IGNORE).sum()
            (token_losses(ddp, ids, labels) / tokens).backward()
            optimizer.step()
        with torch.no_grad():
            loss = token_losses(ddp.module, test_ids, test_labels).item()
        loss /= (test_labels != IGNORE).sum().item()
        if rank == 0:
            print(f"epoch {epoch}: loss per token {loss:.4f}")
    dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    main()
