"""Fine-tuning with batches of token sequences; a sampler begins after the samples that are done."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

MICRO_BATCH, STEPS = 8, 12


class PackedSampler:
    """Gives each rank its part of a global batch, in the order of the data set."""

    def __init__(self, total, consumed, rank, world_size):
        self.total, self.consumed = total, consumed
        self.rank, self.global_batch = rank, MICRO_BATCH * world_size

    def __iter__(self):
        start = self.consumed % self.total
        for first in range(start, self.total, self.global_batch):
            begin = first + self.rank * MICRO_BATCH
            yield list(range(begin, begin + MICRO_BATCH))

    def __len__(self):
        return (self.total - self.consumed % self.total) // self.global_batch


def cyclic(loader):
    while True:
        yield from loader


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    tokens = torch.randint(17, (48, 8), generator=torch.Generator().manual_seed(4))
    model = nn.Sequential(nn.Embedding(17, 12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 17))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = consumed = 0
    if args.load:
        state = torch.load(args.load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, consumed = state["step"], state["consumed"]
    ddp = DDP(model)
    world_size = dist.get_world_size()
    sampler = PackedSampler(len(tokens), consumed, dist.get_rank(), world_size)
    batches = cyclic(DataLoader(tokens, batch_sampler=sampler))
    for step in range(step + 1, STEPS + 1):
        batch = next(batches)
        logits = ddp(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        consumed += len(batch) * world_size
        if step % 2 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step, "consumed": consumed}, f"iter_{step:05}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load")
    main(parser.parse_args())
