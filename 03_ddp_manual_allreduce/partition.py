"""Cut a data set into disjoint parts, one for each rank.

    python 03_ddp_manual_allreduce/partition.py

The two classes carry the names of the PyTorch tutorial "Writing Distributed Applications".
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from torch.utils.data import Dataset, Subset

from common.options import Parser


class Partition(Subset):
    """The part of a data set that one rank sees: `indices` into it, fetched a batch at a time."""


class DataPartitioner:
    """Shuffle the indices of a data set once and cut them into parts.

    sizes: the fraction of the data set that each part holds. Every rank must use the same seed,
    or the parts overlap. Fractions are rounded down, so that equal fractions give equal parts and
    every rank makes the same number of steps; up to len(sizes) − 1 samples belong to no part.
    """

    def __init__(self, data: Dataset, sizes: Sequence[float], seed: int) -> None:
        indices = list(range(len(data)))  # type: ignore[arg-type]
        random.Random(seed).shuffle(indices)
        # 1e-6: in floating point, 49 × (1 / 49) is a little less than 1.
        lengths = [int(len(indices) * size + 1e-6) for size in sizes]
        ends = list(accumulate(lengths))
        self.data = data
        self.parts = [indices[end - n : end] for n, end in zip(lengths, ends, strict=True)]

    def use(self, rank: int) -> Partition:
        return Partition(self.data, self.parts[rank])


def main() -> None:
    data = [f"sample {index}" for index in range(10)]
    partitioner = DataPartitioner(data, [1 / 3] * 3, seed=1234)  # type: ignore[arg-type]
    for rank in range(3):
        part = partitioner.use(rank)
        print(f"rank {rank}: {[part[index] for index in range(len(part))]}")
    used = {index for part in partitioner.parts for index in part}
    print(f"in no part: {[data[index] for index in range(len(data)) if index not in used]}")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
