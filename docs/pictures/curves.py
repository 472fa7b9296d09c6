"""Curves: what one line of stage 03 prevents, and how far a job scales."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.result_files import Results, origin_line
from docs.pictures.svg import INK, Drawing
from forecast import LINKS, Forecast
from gradient_order import fill_buckets, gradients_of_classifier
from published import published_job, speedups
from step_model import Job

LEFT, RIGHT, TOP, BOTTOM = 60, 460, 64, 250  # of what lies between the axes
LABELS = {"right": "averaged", "wrong": "not averaged"}


class Plot:
    """Two axes in a drawing: x and y in the units of the data."""

    def __init__(self, drawing: Drawing, x: float, y: float) -> None:
        """x, y: the ends of the axes, which begin at 0."""
        self.drawing, self.x_end, self.y_end = drawing, x, y
        drawing.line(LEFT, BOTTOM, RIGHT, BOTTOM)
        drawing.line(LEFT, BOTTOM, LEFT, TOP)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (RIGHT - LEFT) * x / self.x_end,
            BOTTOM - (BOTTOM - TOP) * y / self.y_end,
        )

    def ticks(self, xs: Sequence[float], ys: Sequence[float], unit: str = "") -> None:
        for value in xs:
            x, _ = self.place(value, 0)
            self.drawing.line(x, BOTTOM, x, BOTTOM + 5)
            self.drawing.words(x, BOTTOM + 22, f"{value:g}", anchor="middle")
        for value in ys:
            _, y = self.place(0, value)
            self.drawing.line(LEFT - 5, y, LEFT, y)
            self.drawing.words(LEFT - 9, y + 6, f"{value:g}{unit}", anchor="end")

    def curve(self, points: Sequence[tuple[float, float]], kind: str, dashes: str = "") -> None:
        self.drawing.curve([self.place(*point) for point in points], kind, dashes)


def epoch_means(losses: Sequence[float], epochs: int = 10) -> list[float]:
    steps = len(losses) // epochs
    return [sum(losses[i : i + steps]) / steps for i in range(0, steps * epochs, steps)]


def draw_losses(results: Results) -> str:
    """The training loss of stage 03 in each epoch, with averaging and without."""
    runs = results["runs"]
    drawing = Drawing("Both losses fall, and one run is wrong", "")
    drawing.words(4, 20, "Both losses fall. One run is wrong.", bold=True)
    plot = Plot(drawing, 10.5, 2.5)
    plot.ticks(range(1, 11), (0, 1, 2))
    drawing.words(LEFT, TOP - 14, "training loss")
    drawing.words(RIGHT, BOTTOM + 44, "epoch", anchor="end")
    for name in ("wrong", "right"):
        means = epoch_means(runs[name]["loss"])
        plot.curve([*enumerate(means, 1)], name)
        for point in enumerate(means, 1):
            drawing.dot(*plot.place(*point), name)
    for y, name in ((92, "wrong"), (142, "right")):
        last, accuracy = epoch_means(runs[name]["loss"])[-1], runs[name]["test_accuracy"]
        drawing.words(RIGHT, y, f"{LABELS[name]}: {last:.2f}", name, "end", bold=True)
        drawing.words(RIGHT, y + 21, f"test accuracy {accuracy:.1%}", name, "end")
        drawing.description += f"{LABELS[name]}: the loss falls to {last:.2f}. "
    caption = "Stage 03 on two ranks, with its averaging or without."
    return with_origin(drawing, caption, results)


def draw_drift(results: Results) -> str:
    """How far the weights of two ranks are apart in each step, with averaging and without."""
    runs = results["runs"]
    far = {name: [100 * value for value in runs[name]["distance"]] for name in runs}
    steps, last = len(far["wrong"]), far["wrong"][-1]
    drawing = Drawing(
        "Stage 03 without its averaging: two ranks drift apart",
        f"After {steps} steps, the weights of two ranks are {last:.0f} % of their length apart; "
        f"with averaging, {max(far['right']):g} % in every step.",
    )
    drawing.words(4, 20, "Without averaging, two models drift apart", bold=True)
    plot = Plot(drawing, steps, 60)
    plot.ticks(range(0, steps + 1, 20), (0, 20, 40, 60), " %")
    drawing.words(4, TOP - 18, "distance of their weights, in % of their length")
    drawing.words(RIGHT, BOTTOM + 44, "step", anchor="end")
    for name in ("wrong", "right"):
        plot.curve([(0, 0), *enumerate(far[name], 1)], name)
    x, y = plot.place(0.62 * steps, far["wrong"][int(0.62 * steps)])
    drawing.words(x - 10, y - 8, f"{LABELS['wrong']}: {last:.0f} %", "wrong", "end", bold=True)
    text = f"{LABELS['right']}: {max(far['right']):g} in every step"
    drawing.words(RIGHT, BOTTOM - 12, text, "right", "end", bold=True)
    caption = "Stage 03 without its averaging: both start alike\nand see different samples."
    return with_origin(drawing, caption, results)


def with_origin(drawing: Drawing, caption: str, results: Results) -> str:
    y = drawing.words(4, BOTTOM + 72, caption)
    return drawing.text(drawing.words(4, y, origin_line(results["provenance"])) - 12)


# 16 V100, ResNet-50: images per second of all and of one, in the table of forecast's page.
OF_16 = 13_443.82 / 894.41


def measured() -> list[tuple[float, float]]:
    """The work of so many GPUs, as NVIDIA measured it."""
    job = published_job("Transformer-XL", "A100", batch=16)
    return [*speedups(job).items(), (16, OF_16)]


def draw_scaling() -> str:
    """The forecast of the page's first command, the same in bf16, and what others measured."""
    gpus, seconds, batch = 64, 0.045, 64
    buckets = fill_buckets(gradients_of_classifier("resnet50", 224))
    job = Job(seconds / 3, 2 * seconds / 3, 0.0, buckets)
    forecast = Forecast(job, batch, 8, LINKS["nvlink-h100"], LINKS["ethernet-25"])
    counts = [1, 2, 4, *range(8, gpus + 1, 8)]

    def work(each: Forecast) -> list[tuple[float, float]]:
        return [(n, n * each.efficiency(n)) for n in counts]

    whole, half = work(forecast), work(replace(forecast, bytes_factor=0.5))
    (_, last), (_, last_half) = whole[-1], half[-1]
    title = f"{gpus} GPUs do the work of {last:.0f}; with one change, {last_half:.0f}"
    about = f"ResNet-50, forecast: {last:.1f} with gradients of 32 bits, {last_half:.1f} with 16."
    drawing = Drawing(title, about)
    drawing.words(4, 20, title, bold=True)
    plot = Plot(drawing, 66, 66)
    plot.ticks((1, 8, 16, 32, 48, 64), (16, 32, 48, 64))
    drawing.words(4, TOP - 18, "work of so many single GPUs")
    drawing.words(RIGHT, BOTTOM + 44, "GPUs", anchor="end")
    lines = (
        (f"none waits: {gpus}", [(0.0, 0.0), (gpus, gpus)], INK, "3 6"),
        (f"gradients of 16 bits: {last_half:.0f}", half, "sending", "9 5"),
        (f"gradients of 32 bits: {last:.0f}", whole, "sending", ""),
    )
    for number, (name, points, kind, dashes) in enumerate(lines):
        y = TOP + 12 + 22 * number
        plot.curve(points, kind, dashes)
        drawing.curve([(LEFT + 10, y), (LEFT + 38, y)], kind, dashes)
        drawing.words(LEFT + 46, y + 6, name, kind)
    for point in measured():
        drawing.dot(*plot.place(*point), "measured")
    drawing.dot(LEFT + 24, TOP + 78, "measured")
    drawing.words(LEFT + 46, TOP + 84, "measured")
    caption = "A forecast for ResNet-50, 45 ms per step on one GPU,\n"
    caption += "8 GPUs per machine, 25 Gbit/s between the machines."
    return drawing.text(drawing.words(4, BOTTOM + 72, caption) - 10)
