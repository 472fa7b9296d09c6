"""Pictures of the number formats, and of which layers compute in 16 bits under autocast."""

import math

import torch
from torch.nn.functional import cross_entropy

from benchmarks.draw.svg import INK, WIDTH, Drawing
from common.models import Net

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
