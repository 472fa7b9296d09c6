"""Pictures of what a lesson explains, computed where they are drawn: nothing is measured."""

from collections.abc import Callable

import torch
import torchvision
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset

import levels
from docs.pictures.svg import INK, WIDTH, Drawing, minus
from gradient_order import fill_buckets, gradients_of
from partition import DataPartitioner


def gradient(samples: torch.Tensor) -> float:
    """The gradient of the mean of (weight × x − 2x)², where the weight is 1."""
    weight = torch.tensor(1.0, requires_grad=True)
    ((weight * samples - 2 * samples) ** 2).mean().backward()
    assert weight.grad is not None
    return weight.grad.item()


def draw_mean() -> str:
    """One step of y = weight × x on four samples, by two ranks and by one process."""
    samples, rate = torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.01
    parts = [samples[rank::2] for rank in (0, 1)]
    each, whole = [gradient(part) for part in parts], gradient(samples)
    average = sum(each) / 2
    assert average == whole
    drawing = Drawing(
        "One step of data-parallel training",
        f"Two ranks hold the same weight and different samples. Their gradients, {each[0]:g} and "
        f"{each[1]:g}, are averaged to {average:g}, and both make the same update, which is that "
        f"of one process with all samples. (The model is weight × x, the target 2x, the loss the "
        f"squared error, the samples {samples.tolist()}, the rate {rate}.)",
    )
    middle, wide = WIDTH / 2, 224
    drawing.words(middle - 70, 24, "a batch of samples", anchor="end")
    for i in range(4):
        drawing.box(middle - 54 + 30 * i, 8, 22, 22, f"rank {i % 2}")
    for rank in (0, 1):
        own, shared = 116 + 248 * rank, middle + (54 if rank else -54)
        drawing.line(shared, 36, own, 56, arrow=True)
        drawing.card(own, 60, wide, f"rank {rank}", [f"rank {rank}", "forward, backward"])
        drawing.words(own, 134, "its gradient", anchor="middle")
        drawing.words(own, 156, minus(each[rank]), f"rank {rank}", "middle", bold=True)
        drawing.line(own, 164, shared, 184, arrow=True)
        drawing.line(shared, 226, own, 246, arrow=True)
        drawing.words(own, 266, "the same gradient", anchor="middle")
        drawing.words(own, 288, minus(average), "gradients", "middle", bold=True)
        update = f"weight: 1 → {1 - rate * average:g}"
        drawing.card(own, 298, wide, INK, [f"learning rate {rate:g}", update])
    drawing.card(middle, 188, 330, "sending", ["all-reduce: the mean of both"])
    ending = f"One process with all samples: gradient {minus(whole)}, too"
    drawing.words(middle, 383, ending, anchor="middle", bold=True)
    return drawing.text(395)


def draw_dataparallel() -> str:
    """The seven parts of a step with DataParallel, on two devices."""
    whole, half = 120, 60
    drawing = Drawing(
        "One step with DataParallel",
        f"The main device cuts a batch of {whole} and copies the weights to device 1. Both run "
        f"forward on {half} samples, the main device computes the loss of all {whole} outputs, "
        "and gradients go back to it. The copy on device 1 is then thrown away.",
    )
    width, main, other = 148, 4, WIDTH - 152
    for x, name in ((main, "main device"), (other, "device 1")):
        drawing.words(x + width / 2, 18, name, anchor="middle", bold=True)

    def part(x: float, y: float, kind: str, text: str) -> None:
        drawing.button(x, y, width, 34, kind, text)

    def sent(y: float, text: str, back: bool = False) -> None:
        begin, end = (other - 6, main + width + 6) if back else (main + width + 6, other - 6)
        drawing.line(begin, y, end, y, arrow=True)
        drawing.words(WIDTH / 2, y - 6, text, "sending", "middle")

    part(main, 28, "parameters", "1 model, batch")
    sent(82, "2 scatter samples")
    sent(112, "3 all weights")
    for x in (main, other):
        part(x, 126, "forward", "4 forward")
    sent(182, "5 gather outputs", back=True)
    part(main, 192, "forward", f"6 loss of {whole}")
    sent(246, "7 output gradients")
    for x in (main, other):
        part(x, 260, "backward", "7 backward")
    sent(316, "7 weight gradients", back=True)
    part(main, 326, "optimizer", "sum, optimizer")
    drawing.box(other, 326, width, 34, "none", INK)
    drawing.words(other + width / 2, 349, "thrown away", anchor="middle")
    for x, stops in ((main, (62, 160, 226, 294)), (other, (160, 294))):
        nexts = {62: 124, 160: 190 if x == main else 258, 226: 258, 294: 324}
        for y in stops:
            drawing.line(x + width / 2, y + 2, x + width / 2, nexts[y], arrow=True)
    return drawing.text(368)


def draw_allreduce() -> str:
    """What each rank holds before an all-reduce and after it."""
    before = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    after = before.sum(dim=0).expand(2, 2)
    drawing = Drawing(
        "An all-reduce of two ranks",
        f"Rank 0 holds {before[0].tolist()} and rank 1 {before[1].tolist()}; afterwards both "
        f"hold the sum {after[0].tolist()}, and divide it by 2.",
    )
    columns = (("its gradient", before), ("the sum", after), ("divided by 2", after / 2))
    for number, (name, tensors) in enumerate(columns):
        x = 72 + 146 * number
        drawing.words(x + 56, 20, name, anchor="middle", bold=True)
        for rank, tensor in enumerate(tensors.tolist()):
            y = 34 + 88 * rank
            for place, value in enumerate(tensor):
                kind = f"rank {rank}" if number == 0 else "gradients"
                drawing.button(x + 58 * place, y, 54, 40, kind, f"{value:g}")
    for rank in (0, 1):
        y = 54 + 88 * rank
        drawing.words(4, y + 6, f"rank {rank}", f"rank {rank}", bold=True)
        drawing.line(186, y, 214, y, arrow=True)
        drawing.line(332, y, 360, y, arrow=True)
    drawing.line(186, 66, 214, 130, arrow=True)
    drawing.line(186, 130, 214, 66, arrow=True)
    drawing.words(200, 186, "all-reduce", "sending", "middle", bold=True)
    return drawing.text(194)


def draw_buckets() -> str:
    """When the buckets of ResNet-18 are full, and how each is sent while the next one fills."""
    with torch.device("meta"):
        model = torchvision.models.resnet18(num_classes=10)
        buckets = fill_buckets(gradients_of(model, torch.empty(2, 3, 64, 64)))
    drawing = Drawing("Buckets are sent while backward fills the next one", "")
    left, scale, sending = 4, 340, 0.4 / sum(bucket.size for bucket in buckets)
    drawing.words(left, 18, "backward, from the last layer to the first", bold=True)
    drawing.box(left, 28, scale, 24, "backward")
    y, begin, free = 66.0, 0.0, 0.0
    for number, bucket in enumerate(buckets, start=1):
        start = max(bucket.ready, free)
        free = start + bucket.size * sending
        text = f"bucket {number}: {bucket.size / 2**20:.1f} MiB, "
        text += f"full after {bucket.ready:.0%} of backward"
        drawing.description += f"{text}. "
        drawing.words(left, y + 14, text)
        fills = (bucket.ready - begin) * scale - 1
        drawing.box(left + begin * scale, y + 22, fills, 20, "gradients", "gradients", is_pale=True)
        drawing.box(left + start * scale, y + 22, (free - start) * scale, 20, "sending")
        begin, y = bucket.ready, y + 58
    drawing.box(left, y + 2, 14, 14, "gradients", "gradients", is_pale=True)
    drawing.words(left + 20, y + 15, "fills")
    drawing.box(90, y + 2, 14, 14, "sending")
    drawing.words(110, y + 15, "its all-reduce")
    drawing.words(left, y + 38, "Counted in ResNet-18's multiplications, not in time.")
    return drawing.text(y + 48)


def draw_ranks() -> str:
    """Two machines with two GPUs each."""
    nodes, gpus = 2, 2
    drawing = Drawing(
        "Node, rank, local rank and GPU",
        "; ".join(
            f"rank {node * gpus + local} is local rank {local} of node {node} and takes GPU {local}"
            for node in range(nodes)
            for local in range(gpus)
        ),
    )
    for node in range(nodes):
        left = 2 + 242 * node
        drawing.box(left, 4, 234, 190, "none", INK)
        drawing.words(left + 117, 26, f"node {node}", anchor="middle", bold=True)
        command = f"torchrun --node-rank={node}"
        drawing.words(left + 117, 46, command, anchor="middle")
        for local in range(gpus):
            x, rank = left + 6 + 113 * local, node * gpus + local
            drawing.box(x, 58, 109, 74, "none", INK)
            drawing.words(x + 54, 80, "process", anchor="middle")
            drawing.words(x + 54, 102, f"rank {rank}", anchor="middle", bold=True)
            drawing.words(x + 54, 122, f"local rank {local}", anchor="middle")
            drawing.line(x + 54, 134, x + 54, 150, arrow=True)
            drawing.box(x + 10, 154, 88, 30, "none", INK)
            drawing.words(x + 54, 175, f"GPU {local}", anchor="middle", bold=True)
    rules = f"WORLD_SIZE = {nodes * gpus}", f"rank = node × {gpus} + local rank, GPU = local rank"
    for row, rule in enumerate(rules):
        drawing.words(WIDTH / 2, 220 + 22 * row, rule, anchor="middle")
    return drawing.text(252)


def draw_levels() -> str:
    """What each of four ranks holds at the levels of shard/: Figure 1 of the ZeRO paper."""
    count, width, gap = 4, 106, 16
    names = {"none": "DDP", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "FSDP"}
    whole = levels.formula("none", count)
    unit = width / sum(whole.values())
    drawing = Drawing("What each of four ranks holds", "")
    drawing.legend(4, whole)
    for rank in range(count):
        drawing.words(4 + (width + gap) * rank, 46, f"rank {rank}")
    y = 56.0
    for level, name in names.items():
        held = levels.formula(level, count)
        total = f"{name}: {sum(held.values()):g} × the parameters' bytes"
        drawing.description += f"{total} on each rank. "
        drawing.words(4, y + 16, total, bold=True)
        y += 24
        for rank in range(count):
            x = 4.0 + (width + gap) * rank
            for kind, size in whole.items():
                drawing.box(x, y, size * unit - 2, 24, "none", INK)
                is_divided = held[kind] < size
                start = x + (rank * held[kind] * unit if is_divided else 0)
                drawing.box(start, y, held[kind] * unit - 2, 24, kind)
                x += size * unit
        y += 36
    return drawing.text(y)


def batches(stage: str, rank: int, epoch: int, count: int, local_batch: int) -> list[list[int]]:
    """What the loader of a stage gives to a rank of two, with seed 0."""
    data, generator = Subset(range(count), range(count)), torch.Generator()  # type: ignore[arg-type]
    sampler = None  # 03 deals the data set itself
    if stage == "03":
        data = DataPartitioner(data, 2, epoch).use(rank)
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
    about = f"{count} samples, a global batch of 4, two epochs."
    drawing = Drawing("Who gets which sample", about)
    names = {"01": "01, one process", "03": "03, dealt by hand"}
    for step in (0, 1):
        drawing.words(162 + 172 * step, 16, f"step {step + 1}", anchor="middle")
    drawing.words(WIDTH - 4, 16, "left out", anchor="end")
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
            numbers = ", ".join(map(str, sorted(left)))
            drawing.words(WIDTH - 4, y - 11, numbers, anchor="end")
            y += 6
    return drawing.text(y)


def draw_padding() -> str:
    """Seven samples for two ranks, dealt in three ways."""
    count = 7
    data = Subset(range(count), range(count))  # type: ignore[arg-type]
    about = "Seven samples, dealt to two ranks."
    drawing = Drawing("What padding and drop_last do", about)
    ways: dict[str, Callable[[int], list[int]]] = {
        "DistributedSampler(data): one comes twice": lambda rank: [
            *DistributedSampler(data, 2, rank, shuffle=False)
        ],
        "with drop_last=True: one is left out": lambda rank: [
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
    drawing.words(4, y + 12, "Shown with shuffle=False; by default, it shuffles.")
    return drawing.text(y + 22)
