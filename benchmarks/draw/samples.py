"""Pictures of who gets which sample: in the loaders of the stages, and with padding."""

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset

import partition
from benchmarks.draw.svg import Drawing


def batches(stage: str, rank: int, epoch: int, count: int, local_batch: int) -> list[list[int]]:
    """What the loader of a stage gives to a rank of two, with seed 0."""
    data, generator = Subset(range(count), range(count)), torch.Generator()  # type: ignore[arg-type]
    sampler = None  # 03 deals the data set itself
    if stage == "03":
        data = partition.DataPartitioner(data, 2, epoch).use(rank)
    else:
        sampler = RandomSampler(data, generator=generator)
        generator.manual_seed(epoch)
    return [x.tolist() for x in DataLoader(data, local_batch, sampler=sampler, drop_last=True)]


def cell(drawing: Drawing, place: int, y: float, sample: int, kind: str) -> None:
    """place: from the left; a global batch has four, and a gap behind it."""
    x = 84 + 40 * place + 12 * (place // 4)
    drawing.button(x, y, 36, 26, kind, str(sample))


def draw_samples(*stages: str) -> str:
    """Who gets which of 10 samples, in two epochs with a global batch of 4."""
    count = 10
    drawing = Drawing("Who gets which sample", f"{count} samples, a global batch of 4, two epochs.")
    names = {"01": "01, one process", "03": "03, dealt by hand"}
    for step in (0, 1):
        drawing.words(162 + 172 * step, 16, f"step {step + 1}", anchor="middle")
    drawing.words(446, 16, "left out")
    y = 22.0
    for epoch in (0, 1):
        for stage in stages:
            drawing.words(4, y + 16, f"{names[stage]}, epoch {epoch}", bold=True)
            y += 24
            left, world_size = {*range(count)}, 1 if stage == "01" else 2
            for rank in range(world_size):
                kind = "batch" if stage == "01" else f"rank {rank}"
                if stage != "01":
                    drawing.words(4, y + 18, kind, kind)
                dealt = batches(stage, rank, epoch, count, 4 // world_size)
                for step, mine in enumerate(dealt):
                    for number, sample in enumerate(mine):
                        place = number * world_size + rank  # 03 deals in turn
                        cell(drawing, 4 * step + place, y, sample, kind)
                        left.remove(sample)
                y += 30
            drawing.words(446, y - 11, ", ".join(map(str, sorted(left))))
            y += 6
    return drawing.text(y)


def draw_padding() -> str:
    """Seven samples for two ranks, dealt in three ways."""
    count = 7
    data = Subset(range(count), range(count))  # type: ignore[arg-type]
    drawing = Drawing("What padding and drop_last do", "Seven samples, dealt to two ranks.")
    ways: dict[str, Callable[[int], list[int]]] = {
        "DistributedSampler(data): one sample comes twice": lambda rank: [
            *DistributedSampler(data, 2, rank, shuffle=False)
        ],
        "DistributedSampler(data, drop_last=True): one is left out": lambda rank: [
            *DistributedSampler(data, 2, rank, shuffle=False, drop_last=True)
        ],
        "range(rank, 7, 2), to evaluate: each sample once": lambda rank: [*range(rank, count, 2)],
    }
    y = 4.0
    for name, deal in ways.items():
        drawing.words(4, y + 16, name, bold=True)
        y += 26
        seen: set[int] = set()
        for rank in (0, 1):
            drawing.words(4, y + 18, f"rank {rank}", f"rank {rank}")
            for place, sample in enumerate(deal(rank)):
                cell(drawing, place, y, sample, f"rank {rank}")
            if again := seen & {*deal(rank)}:
                x = 84 + 40 * deal(rank).index(*again)
                drawing.box(x - 2, y - 2, 40, 30, "none", "sending")
                drawing.words(x + 50, y + 19, "again", "sending", bold=True)
            seen |= {*deal(rank)}
            y += 30
        y += 8
    return drawing.text(y)
