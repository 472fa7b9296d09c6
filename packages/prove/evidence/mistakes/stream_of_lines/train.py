"""Next-character model over a stream of lines that is too long to be held in memory."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def lines(count=192):
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ate", "rat", "tea"]
    g = torch.Generator().manual_seed(5)
    for _ in range(count):
        picks = torch.randint(len(words), (9,), generator=g).tolist()
        yield (" ".join(words[n] for n in picks) + " " * 24)[:24]


class Stream(IterableDataset):
    def __init__(self, shuffle_buffer=32, seed=0):
        self.buffer_size, self.seed, self.epoch = shuffle_buffer, seed, 0

    def examples(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        buffer = []
        for line in lines():
            buffer.append(torch.tensor([LETTERS.index(letter) for letter in line]))
            if len(buffer) == self.buffer_size:
                yield buffer.pop(int(torch.randint(len(buffer), (1,), generator=g)))
        yield from buffer

    def __iter__(self):
        yield from self.examples()


class CharModel(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, len(LETTERS))

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    stream = Stream(seed=args.seed)
    loader = DataLoader(stream, batch_size=args.batch_size)
    model = DDP(CharModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        stream.epoch = epoch
        for ids in loader:
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
