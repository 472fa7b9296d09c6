"""Saves every three steps. A loader that skips what is done finishes the epoch of the stop."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


class SkipBatches(BatchSampler):
    def __init__(self, batches, count):
        self.batches, self.count = batches, count

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            if number >= self.count:
                yield batch

    def __len__(self):
        return len(self.batches) - self.count


class EpochLoader:
    """Counts how often it was begun, and tells the sampler, so nobody has to call set_epoch."""

    def __init__(self, data, batches, iteration=0):
        self.data, self.batches, self.iteration = data, batches, iteration
        self.loader = DataLoader(data, batch_sampler=batches)

    def set_epoch(self, epoch):
        self.iteration = epoch
        batches = getattr(self.batches, "batches", self.batches)
        batches.sampler.set_epoch(epoch)

    def __iter__(self):
        self.set_epoch(self.iteration)
        yield from self.loader
        self.iteration += 1

    def __len__(self):
        return len(self.batches)


def skip_first_batches(loader, count):
    return EpochLoader(loader.data, SkipBatches(loader.batches, count))


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    data = TensorDataset(x, x.sort(1).values)
    model = nn.Sequential(nn.Linear(6, 18), nn.ReLU(), nn.Linear(18, 6))
    ddp, optimizer = DDP(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = EpochLoader(data, BatchSampler(DistributedSampler(data), 8, drop_last=True))
    step = 0
    if args.resume:
        state = torch.load("step.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    first_epoch, done = divmod(step, len(loader))
    for epoch in range(first_epoch, 4):
        loader.set_epoch(epoch)
        batches = skip_first_batches(loader, done) if done else loader
        done = 0
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 3 == 0 and dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, "step.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
