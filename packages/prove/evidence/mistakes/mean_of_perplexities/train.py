"""A recurrent language model, and its perplexity on sentences of any length."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PAD, WORDS = 0, 15


def sentences(n, shortest, longest, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest, (n,), generator=g).tolist()
    return [torch.randint(1, 4, (length,), generator=g).cumsum(0) for length in lengths]


def collate(batch):
    return pad_sequence(
        [1 + sentence % (WORDS - 1) for sentence in batch], batch_first=True, padding_value=PAD
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.out = (
            nn.Embedding(WORDS, 8),
            nn.GRU(8, 12, batch_first=True),
            nn.Linear(12, WORDS),
        )

    def forward(self, ids):
        return self.out(self.rnn(self.words(ids))[0]).transpose(1, 2)


class Perplexity:
    def __init__(self):
        self.nll, self.tokens = 0.0, 0

    def update(self, logits, labels):
        self.nll += cross_entropy(logits, labels, ignore_index=PAD, reduction="sum").item()
        self.tokens += int((labels != PAD).sum())

    def aggregate(self):
        perplexity = torch.tensor(math.exp(self.nll / self.tokens))
        dist.all_reduce(perplexity)
        return perplexity.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    train, valid = sentences(128, 9, 10, seed=1), sentences(40, 3, 16, seed=2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler, collate_fn=collate)
    mine = range(rank, len(valid), world)
    valid_loader = DataLoader(valid, batch_size=5, sampler=mine, collate_fn=collate)
    model = Model()
    ddp = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(ids[:, :-1]), ids[:, 1:]).backward()
            optimizer.step()
        metric = Perplexity()
        model.eval()
        with torch.no_grad():
            for ids in valid_loader:
                metric.update(model(ids[:, :-1]), ids[:, 1:])
        model.train()
        perplexity = metric.aggregate()
        if rank == 0:
            print(f"epoch {epoch}: perplexity {perplexity:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
