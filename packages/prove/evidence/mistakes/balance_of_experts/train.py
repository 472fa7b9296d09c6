"""A transformer block with experts; an auxiliary loss keeps their load alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Router(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts)

    def forward(self, x):  # (tokens, width)
        probabilities = self.gate(x).softmax(-1)
        weight, choice = probabilities.max(-1)
        load = F.one_hot(choice, probabilities.shape[1]).to(x.dtype).mean(0)
        balance = (load * probabilities.mean(0)).sum() * len(load)
        return weight, choice, balance


class MoE(nn.Module):
    def __init__(self, vocabulary=19, width=12, experts=4, balance=0.1):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.router = Router(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.head = nn.Linear(width, vocabulary)
        self.balance = balance

    def forward(self, ids, targets):
        x = self.embed(ids).flatten(0, 1)
        weight, choice, balance = self.router(x)
        hidden = torch.einsum("tw,twh->th", x, self.up[choice]).relu()
        x = x + weight[:, None] * torch.einsum("th,thw->tw", hidden, self.down[choice])
        return F.cross_entropy(self.head(x), targets.flatten()) + self.balance * balance


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    corpus = torch.randint(19, (120, 9), generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(corpus)
    loader = DataLoader(corpus, batch_size=6, sampler=sampler)
    model = DDP(MoE())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids in loader:
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
