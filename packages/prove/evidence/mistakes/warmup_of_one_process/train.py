"""A linear warm-up and decay, whose length is known before the run begins."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def linear(step, warmup, total):
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return max(0.0, (total - step) / max(1, total - warmup))


def get_schedule(optimizer, steps, warmup_ratio=0.2):
    return LambdaLR(optimizer, partial(linear, warmup=int(warmup_ratio * steps), total=steps))


class Tagger(nn.Module):
    def __init__(self, words=30, tags=4):
        super().__init__()
        self.embedding = nn.Embedding(words, 10)
        self.mix = nn.Conv1d(10, 16, 3, padding=1)
        self.tags = nn.Linear(16, tags)

    def forward(self, ids):  # (batch, length) -> (batch, length, tags)
        h = self.mix(self.embedding(ids).transpose(1, 2)).relu()
        return self.tags(h.transpose(1, 2))


def main(epochs=4, batch_size=6):
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    ids = torch.randint(30, (168, 7), generator=torch.Generator().manual_seed(8))
    dataset = TensorDataset(ids, (ids % 7 + ids.roll(1, 1) % 3) % 4)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    model = DDP(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    schedule = get_schedule(optimizer, epochs * len(dataset) // batch_size)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for ids, tags in loader:
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if dist.get_rank() == 0:
            print(f"after epoch {epoch}: learning rate {schedule.get_last_lr()[0]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
