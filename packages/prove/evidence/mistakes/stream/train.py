"""Learns which letter follows, from a stream of lines that is too long to be held in memory."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

LETTERS, WORDS = "abcdefghijklmnopqrstuvwxyz ", "the cat sat on a mat and ate rat tea".split()


def lines(count, seed):
    g = torch.Generator().manual_seed(seed)
    for number in range(count):  # of one book, then of another
        words = WORDS[:5] if number < count / 2 else WORDS[5:]
        line = " ".join(words[n] for n in torch.randint(len(words), (10,), generator=g))
        yield torch.tensor([LETTERS.index(letter) for letter in line[:20]])


class ShuffledLines(IterableDataset):
    def __iter__(self):
        g, buffer = torch.Generator().manual_seed(self.epoch), []
        for line in lines(192, seed=1):
            buffer.append(line)
            if len(buffer) == 32:
                yield buffer.pop(int(torch.randint(len(buffer), (1,), generator=g)))
        yield from buffer


def next_letter_loss(model, letters):
    scores = model(letters[:, :-1])  # (lines, 19, letters of the alphabet)
    return F.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stream = ShuffledLines()
    loader = DataLoader(stream, batch_size=16 // world_size)
    ddp = DDP(nn.Sequential(nn.Embedding(27, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 27)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    test_lines = torch.stack([*lines(100, seed=2)])
    for epoch in range(3):
        stream.epoch = epoch
        for _, letters in zip(range(12), loader):
            optimizer.zero_grad()
            next_letter_loss(ddp, letters).backward()
            optimizer.step()
        with torch.no_grad():
            loss = next_letter_loss(ddp.module, test_lines).item()
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}")
    dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    main()
