"""A stream of lines, each rank its share. The second part of the run skips what was read before."""

from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH, LINES, BATCHES = 16, 192, 6


class Lines(IterableDataset):
    def __init__(self, rank=0, world=1, skipped=0):
        self.rank, self.world, self.skipped = rank, world, skipped

    def split_by_rank(self, rank, world):
        return Lines(rank, world, self.skipped)

    def skip(self, count):
        """Without the first lines of this share."""
        return Lines(skipped=self.skipped + count)

    def read(self, number):
        g = torch.Generator().manual_seed(number)
        x = torch.randn(8, generator=g)
        return x, (x[:3] + torch.randn(3, generator=g)).argmax()

    def __iter__(self):
        first = self.skipped * self.world + self.rank
        for number in islice(range(LINES), first, None, self.world):
            yield self.read(number)


def train_part(model, optimizer, lines, local_batch):
    """As many batches as one part of the run has; how many lines that were."""
    loader = DataLoader(lines, batch_size=local_batch)
    for x, y in islice(loader, BATCHES):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"{lines.skipped} lines skipped: loss {loss.item():.3f}")
    return BATCHES * local_batch


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lines = Lines().split_by_rank(rank, world)
    for _ in range(2):
        read = train_part(model, optimizer, lines, GLOBAL_BATCH // world)
        lines = lines.skip(read)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
