"""A small usual script: sequences with padding, gradient accumulation, clipping, a warm-up."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE, WORDS, LENGTH, PADDING = 2, 11, 7, 0


def sentences(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(1, WORDS, (count, LENGTH + 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    words[torch.arange(LENGTH + 1) > lengths] = PADDING
    return TensorDataset(words[:, :-1], words[:, 1:])


class NextWord(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.hidden = nn.Linear(8, 12)
        self.output = nn.Linear(12, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(words))))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = sentences(96), sentences(30)
    model = NextWord()
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    loader = DataLoader(train_set, batch_size=12 // world_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=10)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ddp.train()
        batches = list(loader)
        for start in range(0, len(batches) - ACCUMULATE + 1, ACCUMULATE):
            group = batches[start : start + ACCUMULATE]
            words = torch.tensor(float(sum((target != PADDING).sum() for _, target in group)))
            dist.all_reduce(words)  # the words of all ranks: what the loss is divided by
            for number, (inputs, target) in enumerate(group):
                last = number == ACCUMULATE - 1
                with nullcontext() if last else ddp.no_sync():
                    logits = ddp(inputs)
                    loss = F.cross_entropy(
                        logits.flatten(0, 1),
                        target.flatten(),
                        ignore_index=PADDING,
                        reduction="sum",
                    )
                    (loss * world_size / words).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                correct = sum((model(x).argmax(2) == y)[y > 0].sum().item() for x, y in test_loader)
            print(f"epoch {epoch}  correct {correct}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
