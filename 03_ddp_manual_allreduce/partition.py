"""Deal a data set out to the ranks, like cards: a sample to each in turn, from one shuffled order.

    python 03_ddp_manual_allreduce/partition.py

The two classes carry the names of the PyTorch tutorial "Writing Distributed Applications".
"""

import torch
from torch.utils.data import Dataset, Subset

from common.options import Parser


class Partition(Subset):
    """The part of a data set that one rank sees: `indices` into it, fetched a batch at a time."""


class DataPartitioner:
    """Shuffle the indices of a data set, and deal them to so many ranks.

    Every rank must use the same seed, or the parts overlap. All parts are equal, so that every rank
    makes the same number of steps; up to world_size − 1 samples, the last ones, belong to no part.
    """

    def __init__(self, data: Dataset, world_size: int, seed: int) -> None:
        samples = len(data)  # type: ignore[arg-type]
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
        dealt = samples // world_size * world_size
        self.data = data
        self.parts = [order[rank:dealt:world_size] for rank in range(world_size)]

    def use(self, rank: int) -> Partition:
        return Partition(self.data, self.parts[rank])


def main() -> None:
    data = [f"sample {index}" for index in range(10)]
    partitioner = DataPartitioner(data, 3, seed=1234)  # type: ignore[arg-type]
    for rank in range(3):
        part = partitioner.use(rank)
        print(f"rank {rank}: {[part[index] for index in range(len(part))]}")
    used = {index for part in partitioner.parts for index in part}
    print(f"in no part: {[data[index] for index in range(len(data)) if index not in used]}")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
