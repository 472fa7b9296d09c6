"""Pictures of what a lesson explains, computed where they are drawn: nothing in them is measured.

pictures.py writes them to docs/pictures/, with those of what was measured.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset

from benchmarks.draw.svg import INK, WIDTH, Drawing
from common.chapters import load_chapter
from common.models import Net

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gradient(samples: torch.Tensor) -> float:
    """Of the mean squared error of weight × x, where the weight is 1 and the target is 2x."""
    weight = torch.tensor(1.0, requires_grad=True)
    ((weight * samples - 2 * samples) ** 2).mean().backward()
    assert weight.grad is not None
    return weight.grad.item()


def draw_mean() -> str:
    """One step of y = weight × x on four samples, by two ranks and by one process."""
    samples, rate = torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.01
    parts = [samples[rank::2] for rank in (0, 1)]
    each = [gradient(part) for part in parts]
    average = sum(each) / 2
    drawing = Drawing(
        "One step of data-parallel training",
        f"Two ranks hold the same weight and different samples. Their gradients, {each[0]:g} and "
        f"{each[1]:g}, are averaged to {average:g}, and both make the same update.",
    )
    middle = WIDTH / 2
    drawing.words(188, 28, "a batch of four samples", anchor="end")
    for i, sample in enumerate(samples.tolist()):
        drawing.button(200 + 52 * i, 8, 44, 30, f"rank {i % 2}", f"{sample:g}")
    for rank, part in enumerate(parts):
        first, second = part.tolist()
        lines = [f"rank {rank}", f"forward and backward of {first:g} and {second:g}"]
        sums = " and ".join(minus(gradient(sample)) for sample in part)
        own, shared = 142 + 316 * rank, middle + (60 if rank else -60)
        drawing.line(shared, 42, own, 64, arrow=True)
        lines.append(f"gradients {sums}, mean {minus(each[rank])}")
        drawing.card(own, 68, 276, f"rank {rank}", lines)
        drawing.line(own, 144, shared, 166, arrow=True)
        drawing.line(shared, 206, own, 228, arrow=True)
        new = f"optimizer step: weight 1 → {1 - rate * average:g}"
        drawing.card(own, 232, 276, INK, [new])
    means = f"the mean of {minus(each[0])} and {minus(each[1])} is {minus(average)}"
    drawing.card(middle, 170, 400, "sending", [f"all-reduce: {means}"])
    whole = gradient(samples)
    ending = f"One process with all four: gradient {minus(whole)}, weight 1 → {1 - rate * whole:g}."
    drawing.words(middle, 292, ending, anchor="middle", bold=True)
    rule = f"(The model is weight × x, its target 2x, the loss squared error, the rate {rate}.)"
    drawing.words(middle, 316, rule, anchor="middle")
    return drawing.text(326)


def minus(number: float) -> str:
    """With the sign that mathematics has."""
    return f"−{-number:g}" if number < 0 else f"{number:g}"


def draw_dataparallel() -> str:
    """The seven parts of a step with DataParallel, on two devices."""
    whole, half = 120, 60
    drawing = Drawing(
        "One step with DataParallel",
        f"The main device cuts a batch of {whole} and copies the weights to device 1. Both run "
        f"forward on {half} samples, the main device computes the loss of all {whole} outputs, "
        "and gradients go back to it. The copy on device 1 is then thrown away.",
    )
    width, main, other = 198, 4, WIDTH - 202
    for x, name in ((main, "main device"), (other, "device 1")):
        drawing.words(x + width / 2, 18, name, anchor="middle", bold=True)

    def part(x: float, y: float, kind: str, text: str) -> None:
        drawing.button(x, y, width, 34, kind, text)

    def sent(y: float, text: str, back: bool = False) -> None:
        begin, end = (other - 6, main + width + 6) if back else (main + width + 6, other - 6)
        drawing.line(begin, y, end, y, arrow=True)
        drawing.words(WIDTH / 2, y - 6, text, "sending", "middle")

    part(main, 28, "parameters", f"1 model, batch of {whole}")
    sent(82, f"2 scatter: {half} samples")
    sent(112, "3 all weights")
    for x, replica in ((main, 0), (other, 1)):
        part(x, 126, "forward", f"4 forward, replica {replica}")
    sent(182, f"5 gather: {half} outputs", back=True)
    part(main, 192, "forward", f"6 loss of {whole} outputs")
    sent(246, "7 gradients of outputs")
    for x in (main, other):
        part(x, 260, "backward", "7 backward")
    sent(316, "7 gradients of weights", back=True)
    part(main, 326, "optimizer", "sum, then optimizer")
    drawing.box(other, 326, width, 34, "none", INK)
    drawing.words(other + width / 2, 349, "copy thrown away", anchor="middle")
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
        x = 90 + 180 * number
        drawing.words(x + 62, 20, name, anchor="middle", bold=True)
        for rank, tensor in enumerate(tensors.tolist()):
            y = 34 + 88 * rank
            for place, value in enumerate(tensor):
                kind = f"rank {rank}" if number == 0 else "gradients"
                drawing.button(x + 64 * place, y, 60, 40, kind, f"{value:g}")
    for rank in (0, 1):
        y = 54 + 88 * rank
        drawing.words(6, y + 6, f"rank {rank}", f"rank {rank}", bold=True)
        drawing.line(220, y, 264, y, arrow=True)
        drawing.line(400, y, 444, y, arrow=True)
    drawing.line(220, 66, 264, 130, arrow=True)
    drawing.line(220, 130, 264, 66, arrow=True)
    drawing.words(242, 186, "all-reduce", "sending", "middle", bold=True)
    return drawing.text(194)


def batches(stage: str, rank: int, epoch: int, count: int, local_batch: int) -> list[list[int]]:
    """What the loader of a stage gives to a rank of two, with seed 0."""
    data, generator = Subset(range(count), range(count)), torch.Generator()  # type: ignore[arg-type]
    sampler = None  # 03 deals the data set itself
    if stage == "03":
        data = load_chapter("03", "partition").DataPartitioner(data, 2, epoch).use(rank)
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
        left = 6 + 298 * node
        drawing.box(left, 4, 290, 190, "none", INK)
        drawing.words(left + 145, 26, f"node {node}", anchor="middle", bold=True)
        command = f"torchrun --nnodes={nodes} --node-rank={node}"
        drawing.words(left + 145, 46, command, anchor="middle")
        for local in range(gpus):
            x, rank = left + 12 + 136 * local, node * gpus + local
            drawing.box(x, 58, 130, 74, "none", INK)
            drawing.words(x + 65, 80, "process", anchor="middle")
            drawing.words(x + 65, 102, f"rank {rank}", anchor="middle", bold=True)
            drawing.words(x + 65, 122, f"local rank {local}", anchor="middle")
            drawing.line(x + 65, 134, x + 65, 150, arrow=True)
            drawing.box(x + 15, 154, 100, 30, "none", INK)
            drawing.words(x + 65, 175, f"GPU {local}", anchor="middle", bold=True)
    total = f"WORLD_SIZE = {nodes * gpus}; rank = node × {gpus} + local rank; GPU = local rank"
    drawing.words(WIDTH / 2, 220, total, anchor="middle")
    return drawing.text(232)


def draw_formats() -> str:
    """The bits of each format, and which of the sizes that a gradient has it can hold."""
    drawing = Drawing("What a number of 32 or 16 bits holds", "")
    draw_bits(drawing, 74)
    draw_ranges(drawing, 74)
    return drawing.text(350)


def draw_bits(drawing: Drawing, left: float) -> None:
    names = {"sign": "sign", "exponent": "exponent: how large", "fraction": "fraction: how exact"}
    for begin, (kind, name) in zip((left, 150, 352), names.items(), strict=True):
        drawing.box(begin, 4, 14, 14, kind)
        drawing.words(begin + 20, 17, name)
    for row, (name, dtype) in enumerate(FORMATS.items()):
        y = 30 + 34 * row
        fraction = round(-math.log2(torch.finfo(dtype).eps))
        exponent = torch.finfo(dtype).bits - 1 - fraction
        drawing.words(4, y + 19, name, bold=True)
        kinds = ["sign"] + ["exponent"] * exponent + ["fraction"] * fraction
        for place, kind in enumerate(kinds):
            drawing.box(left + 15.5 * place, y, 14, 26, kind)


def draw_ranges(drawing: Drawing, left: float) -> None:
    low, high = -46, 40  # powers of ten
    scale = (WIDTH - left - 8) / (high - low)

    def place(value: float) -> float:
        return left + (math.log10(value) - low) * scale

    drawing.words(4, 158, "from the smallest to the largest number", bold=True)
    for row, (name, dtype) in enumerate(FORMATS.items()):
        about, y = torch.finfo(dtype), 172 + 34 * row
        smallest = about.smallest_normal * about.eps  # what rounds to 0 is smaller still
        drawing.words(4, y + 19, name, bold=True)
        drawing.box(place(smallest), y, place(about.max) - place(smallest), 26, "exponent")
        drawing.description += f"{name}: from {smallest:.0e} to {about.max:.0e}. "
    for power in (-40, -20, 0, 20, 38):
        x = place(10.0**power)
        drawing.line(x, 278, x, 284)
        drawing.words(x, 302, f"1e{power}" if power else "1", anchor="middle")
    small, y = 1e-8, 318
    drawing.line(place(small), 240, place(small), y - 6)
    drawing.line(place(small), y, place(small * 65536), y, arrow=True)
    drawing.box(place(small) - 4, y - 4, 8, 8, "gradients")
    text = "a gradient of 1e-8 is 0 in fp16; times 65536, it fits"
    drawing.words(place(1.0) - 8, y + 24, text, anchor="middle", bold=True)


def formats_in_autocast() -> list[tuple[str, torch.dtype]]:
    """Each layer of net-bn with the format of its output, and the loss."""
    layers: list[tuple[str, torch.dtype]] = [("images", torch.float32)]
    model = Net(channels=1, image_size=28, classes=10, batch_norm=True)
    for layer in model.children():
        layer.register_forward_hook(
            lambda layer, inputs, output: layers.append(
                (type(layer).__name__.removesuffix("2d"), output.dtype)
            )
        )
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(torch.rand(2, 1, 28, 28)), torch.tensor([0, 1]))
    return [*layers, ("loss", loss.dtype)]


def draw_autocast() -> str:
    """In which format each layer computes under autocast, row by row."""
    layers = [layer for layer in formats_in_autocast() if layer[0] != "Identity"]
    halves = sum(dtype is torch.bfloat16 for _, dtype in layers)
    drawing = Drawing(
        "Which layers compute in 16 bits",
        f"Of a forward with {len(layers)} parts, {halves} give numbers in bf16. The images and the "
        "loss are in fp32, and so are the weights.",
    )
    per_row = 5
    for place, (name, dtype) in enumerate(layers):
        row, column = divmod(place, per_row)
        x, y = 4 + 119 * column, 8 + 48 * row
        if dtype is torch.bfloat16:
            drawing.button(x, y, 106, 32, "16 bits", name)
        else:
            drawing.box(x, y, 106, 32, "none", INK)
            drawing.words(x + 53, y + 22, name, anchor="middle", bold=True)
        if place + 1 < len(layers) and column + 1 < per_row:
            drawing.line(x + 106, y + 16, x + 118, y + 16, arrow=True)
    bottom = 8 + 48 * -(-len(layers) // per_row)
    drawing.box(4, bottom, 14, 14, "none", INK)
    drawing.words(24, bottom + 13, "32 bits, like all weights")
    drawing.box(240, bottom, 14, 14, "16 bits")
    drawing.words(260, bottom + 13, "16 bits")
    return drawing.text(bottom + 24)


def draw_levels() -> str:
    """What each of four ranks holds at the levels of shard/: Figure 1 of the ZeRO paper."""
    levels = load_chapter("beyond/shard", "levels")
    count, width, gap = 4, 132, 16
    names = {"none": "DDP", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "FSDP"}
    whole = levels.formula("none", count)
    unit = width / sum(whole.values())
    drawing = Drawing("What each of four ranks holds", "")
    drawing.legend(4, whole)
    for rank in range(count):
        drawing.words(4 + (width + gap) * rank, 46, f"rank {rank}")
    y = 52.0
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


PICTURES: dict[str, Callable[[], str]] = {
    "mean": draw_mean,
    "dataparallel": draw_dataparallel,
    "allreduce": draw_allreduce,
    "samples_01": partial(draw_samples, "01"),
    "samples_03": partial(draw_samples, "01", "03"),
    "padding": draw_padding,
    "ranks": draw_ranks,
    "formats": draw_formats,
    "autocast": draw_autocast,
    "levels": draw_levels,
}
