"""Trains a small language model, and prints its perplexity on sentences it has not seen."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def sentences(count, shortest, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, 17, (count, 1), generator=g)
    steps = torch.randint(1, 4, (count, 16), generator=g)
    steps[::2] = 1  # every second sentence only counts
    words = 1 + steps.cumsum(1) % 14
    return words * (torch.arange(16) < lengths)  # behind the end of a sentence: 0


def summed_loss(model, ids):
    scores = model(ids[:, :-1]).transpose(1, 2)  # (sentences, 15, 15): of each word, at each place
    return cross_entropy(scores, ids[:, 1:], ignore_index=0, reduction="sum")


@torch.no_grad()
def perplexity(model, loader):
    loss, words = 0.0, 0
    for ids in loader:
        loss += summed_loss(model, ids).item()
        words += (ids[:, 1:] != 0).sum().item()
    result = torch.tensor(loss / words).exp()
    dist.all_reduce(result)
    return result.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = sentences(160, 16, seed=1), sentences(20, 3, seed=3)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 16 // world_size, sampler=sampler)
    test_loader = DataLoader(test_set[rank::world_size], 5)
    model = DDP(nn.Sequential(nn.Embedding(15, 32), nn.ReLU(), nn.Linear(32, 15)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for ids in loader:
            optimizer.zero_grad()
            (summed_loss(model, ids) / ids[:, 1:].numel()).backward()
            optimizer.step()
        result = perplexity(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {result:.4f}")
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
