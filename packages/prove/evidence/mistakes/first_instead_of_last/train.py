"""Speech-like batches; gradients of several batches are added up before a step."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Utterances(torch.utils.data.Dataset):
    def __init__(self, n=128):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        g = torch.Generator().manual_seed(number)
        word = number % 5
        return torch.randn(15, 4, generator=g) + word / 3, word


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(4, 12, 5)
        self.output = nn.Linear(12, 5)

    def forward(self, x):
        return self.output(self.convolution(x.transpose(1, 2)).relu().mean(2))


class Runner:
    def __init__(self, args):
        self.accum_grad = args.accum_grad
        self.model = DDP(Recognizer())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def run_epoch(self, loader):
        for batch_idx, (x, word) in enumerate(loader):
            step_now = (batch_idx + 1) % self.accum_grad == 0
            my_context = contextlib.nullcontext
            if batch_idx % self.accum_grad != 0:
                my_context = self.model.no_sync
            with my_context():
                loss = nn.functional.cross_entropy(self.model(x), word) / self.accum_grad
                loss.backward()
            if step_now:
                nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                self.optimizer.step()
                self.optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum-grad", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    utterances = Utterances()
    sampler = DistributedSampler(utterances)
    loader = DataLoader(utterances, batch_size=8, sampler=sampler)
    runner = Runner(args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        runner.run_epoch(loader)
    dist.destroy_process_group()
