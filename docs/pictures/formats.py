"""Pictures of the number formats: their bits, what autocast does with layers, their speeds."""

import math
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.result_files import Results
from common.models import Net
from docs.pictures.svg import INK, ON_DARK, WIDTH, Drawing

LAYOUTS = ("contiguous", "channels_last")  # of images in memory
HIGH = 34  # of a layer
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADVICE = {
    "fp32": "",
    "tf32": ", the default for convolutions",
    "bf16": ": take this, it needs no scaler",
    "fp16": ", which also needs a scaler",
}
RECOMMENDED = "bf16"


def draw_formats() -> str:
    """The bits of each format, and which of the sizes that a gradient has it can hold."""
    drawing = Drawing("What a number of 32 or 16 bits holds", "")
    draw_bits(drawing, 60)
    draw_ranges(drawing, 60)
    return drawing.text(374)


def draw_bits(drawing: Drawing, left: float) -> None:
    names = {"sign": "sign", "exponent": "exponent: how large", "fraction": "fraction: how exact"}
    for begin, (kind, name) in zip((4, 76, 276), names.items(), strict=True):
        drawing.box(begin, 4, 14, 14, kind)
        drawing.words(begin + 20, 17, name)
    for row, (name, dtype) in enumerate(FORMATS.items()):
        y = 30 + 34 * row
        fraction = round(-math.log2(torch.finfo(dtype).eps))
        exponent = torch.finfo(dtype).bits - 1 - fraction
        drawing.words(4, y + 19, name, bold=True)
        kinds = ["sign"] + ["exponent"] * exponent + ["fraction"] * fraction
        for place, kind in enumerate(kinds):
            drawing.box(left + 13 * place, y, 11.5, 26, kind)


def draw_ranges(drawing: Drawing, left: float) -> None:
    low, high = -46, 40  # powers of ten
    scale = (WIDTH - left - 22) / (high - low)

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
    text = "a gradient of 1e-8 is 0 in fp16;\ntimes 65536, it fits"
    drawing.words(WIDTH - 8, y + 26, text, anchor="end", bold=True)


class Choice(Enum):
    """What autocast does with the format of a layer's input."""

    CASTS = "16-bit product"  # to bf16, whatever comes
    FOLLOWS = "stays in 16 bits"
    NEITHER = "32 bits"


# The fill of a layer, its outline, and the color of its name.
LOOKS = {
    Choice.CASTS: ("16 bits", "16 bits", ON_DARK),
    Choice.FOLLOWS: ("none", "16 bits", "16 bits"),
    Choice.NEITHER: ("32 bits", "32 bits", ON_DARK),
}


def choices_of_autocast() -> list[tuple[str, Choice]]:
    """Ask autocast what it chooses for each layer of net-bn, and for the loss."""
    choices = [("images", Choice.NEITHER)]
    model = Net(channels=1, image_size=28, classes=10, batch_norm=True)

    def note_choice(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        of_fp32 = layer.forward(inputs[0].float()).dtype
        choice = Choice.CASTS if of_fp32 is torch.bfloat16 else Choice.FOLLOWS
        assert output.dtype is torch.bfloat16
        choices.append((type(layer).__name__.removesuffix("2d"), choice))

    for layer in model.children():
        if not isinstance(layer, nn.Identity):
            layer.register_forward_hook(note_choice)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(torch.rand(2, 1, 28, 28)), torch.tensor([0, 1]))
    loss.backward()
    weights = [*model.parameters()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert gradients
    assert {each.dtype for each in (loss, *weights, *gradients)} == {torch.float32}
    return [*choices, ("loss", Choice.NEITHER)]


def draw_autocast() -> str:
    """Which layers autocast computes in 16 bits, row by row."""
    choices = choices_of_autocast()
    casts = sum(choice is Choice.CASTS for _, choice in choices)
    drawing = Drawing(
        "Which layers autocast computes in 16 bits",
        f"Of the {len(choices)} parts of a forward, {casts} convert their input and their weights "
        "to bf16. The layers between them take what comes. The images, the loss, the weights and "
        "their gradients are in fp32.",
    )
    per_row, wide, below, step = 4, 110, 58, 121
    for place, (name, choice) in enumerate(choices):
        row, column = divmod(place, per_row)
        x, y, middle = 4 + step * column, 4 + below * row, 4 + wide / 2
        draw_choice(drawing, x, y, wide, name, choice)
        if place + 1 == len(choices):
            draw_choice(
                drawing, x + step, y, WIDTH - x - step - 3, "all weights, all .grad", Choice.NEITHER
            )
            break
        if column + 1 < per_row:
            drawing.line(x + wide, y + HIGH / 2, x + step - 1, y + HIGH / 2, arrow=True)
        else:  # around, to the start of the next row
            end, between = x + wide / 2, y + (HIGH + below) / 2 - 2
            drawing.line(end, y + HIGH, end, between)
            drawing.line(end, between, middle, between)
            drawing.line(middle, between, middle, y + below - 1, arrow=True)
    y = 16 + below * -(-len(choices) // per_row)
    left = 4.0
    for choice in Choice:
        draw_choice(drawing, left, y, 20, "", choice)
        drawing.words(left + 28, y + HIGH / 2 + 6, choice.value)
        left += 28 + drawing.width_of(choice.value) + 16
    return drawing.text(y + HIGH + 8)


def draw_choice(
    drawing: Drawing, x: float, y: float, wide: float, name: str, choice: Choice
) -> None:
    fill, outline, ink = LOOKS[choice]
    drawing.box(x, y, wide, HIGH, fill, outline)
    drawing.words(x + wide / 2, y + HIGH / 2 + 6, name, ink, "middle", bold=True)


def draw_speeds(results: Results) -> str:
    """Images per second of the first model, in each format and memory layout, on a GPU."""
    name, measured = next(iter(results["models"].items()))
    speeds = {label: row["images_per_second"] for label, row in measured["variants"].items()}
    gpu = results["provenance"]["hardware"].removeprefix("1 x NVIDIA ")
    heading = f"{name} on one {gpu}: images per second"
    drawing = Drawing(heading, "")
    drawing.words(4, 18, heading, bold=True)
    drawing.legend(28, LAYOUTS)
    left, right, high = 12, 74, 88  # room for a margin, for the numbers, and for a format
    scale = (WIDTH - left - right) / max(speeds.values())
    for row, (form, about) in enumerate(ADVICE.items()):
        y = 58 + high * row
        if form == RECOMMENDED:
            drawing.box(2, y, WIDTH - 4, high - 4, "none", "right")
        kind = "right" if form == RECOMMENDED else INK
        drawing.words(left, y + 20, f"{form}{about}", kind, bold=form == RECOMMENDED)
        for place, layout in enumerate(LAYOUTS):
            speed, top = speeds[f"{form}, {layout}"], y + 28 + 26 * place
            drawing.box(left, top, scale * speed, 22, layout)
            drawing.words(left + scale * speed + 8, top + 17, f"{speed:,.0f}", bold=True)
            drawing.description += f"{form}{about}, {layout}: {speed:,.0f}. "
    return drawing.text(58 + high * len(ADVICE))
