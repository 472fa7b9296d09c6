"""Pictures of what comes after what: a step, a BatchNorm over two ranks, a vote."""

import torch
from torch.nn.functional import batch_norm

from docs.pictures.svg import INK, WIDTH, Drawing, minus

HIGH, BETWEEN = 34, 32  # a part, and the arrow to the next one


def draw_step() -> str:
    """The loop of stage 01, and the six places where a second copy would go wrong."""
    parts = (
        ("batch", "batch", 4, "the same samples"),
        ("forward, dropout", "forward", 5, "the same masks"),
        ("backward", "backward", 0, ""),
        ("optimizer step", "optimizer", 0, ""),
        ("evaluation", "", 2, "the whole test set"),
        ("checkpoint", "", 6, "the same file"),
    )
    arrows = {0: (3, "the same GPU"), 2: (1, "a gradient of its own")}  # below the part
    drawing = Drawing("A step of stage 01, and its six places", "")
    left, wide, named = 56, 176, 250
    drawing.words(left, 18, "a step", bold=True)
    drawing.words(named, 18, "each copy would have", bold=True)

    def place(y: float, number: int, about: str) -> None:
        drawing.button(named, y, 26, 26, "you", str(number))
        drawing.words(named + 36, y + 19, about)
        drawing.description += f"Place {number}: {about}. "

    for row, (name, kind, number, about) in enumerate(parts):
        y = 30 + (HIGH + BETWEEN) * row
        if kind:
            drawing.button(left, y, wide, HIGH, kind, name)
        else:
            drawing.box(left, y, wide, HIGH, "none", INK)
            drawing.words(left + wide / 2, y + 23, name, anchor="middle", bold=True)
        if number:
            place(y + 4, number, about)
        if row + 1 < len(parts):
            below = y + HIGH
            drawing.line(left + wide / 2, below + 2, left + wide / 2, below + BETWEEN - 3, True)
            if row in arrows:
                place(below + 3, *arrows[row])
    last = 30 + (HIGH + BETWEEN) * 3 + HIGH / 2  # the middle of the optimizer's step
    drawing.line(left - 2, last, 30, last)
    drawing.line(30, last, 30, 30 + HIGH / 2)
    drawing.line(30, 30 + HIGH / 2, left - 3, 30 + HIGH / 2, arrow=True)
    drawing.words_up(20, (last + 30 + HIGH / 2) / 2, "next batch")
    drawing.words(left + wide / 2 + 14, last + HIGH / 2 + 22, "at the end of an epoch")
    return drawing.text(30 + (HIGH + BETWEEN) * len(parts) - BETWEEN + 8)


def draw_syncbn() -> str:
    """The example of 05_amp_syncbn/sync_batchnorm.py: two ranks, three samples each."""
    batch = torch.tensor([[1.0], [10.0], [2.0], [20.0], [3.0], [30.0]])
    parts = [batch[rank::2] for rank in (0, 1)]
    alone = [batch_norm(part, None, None, training=True) for part in parts]
    assert torch.allclose(alone[0], alone[1], atol=1e-3)
    whole = batch_norm(batch, None, None, training=True)
    drawing = Drawing(
        "SyncBatchNorm on two ranks",
        "Each rank computes count, mean and variance of its three samples. One all-reduce makes "
        "of them the mean and the variance of all six, by which both ranks scale their own: ",
    )
    for rank, part in enumerate(parts):
        left, middle = 4 + 244 * rank, 118 + 244 * rank
        kind, toward = f"rank {rank}", WIDTH / 2 + (54 if rank else -54)

        def row(y: float, values: list[float], kind: str = kind, left: float = left) -> None:
            for place, value in enumerate(values):
                drawing.button(left + 77 * place, y, 74, HIGH, kind, minus(round(value, 3)))

        drawing.words(middle, 18, f"{kind}: its samples", kind, "middle", bold=True)
        row(28, part.flatten().tolist())
        variance = part.var(correction=0).item()
        for line, text in enumerate((f"mean {part.mean():g}", f"variance {variance:.2f}")):
            drawing.words(middle, 84 + 22 * line, text, anchor="middle")
        drawing.line(middle, 114, toward, 134, arrow=True)
        drawing.line(toward, 197, middle, 217, arrow=True)
        drawing.words(middle, 237, "its samples, scaled", kind, "middle", bold=True)
        scaled = whole[rank::2].flatten().tolist()
        row(247, scaled)
        drawing.description += f"{kind} gets {', '.join(f'{v:.3f}' for v in scaled)}. "
    variance = batch.var(correction=0).item()
    shared = f"of all six: mean {batch.mean():g}, variance {variance:.2f}"
    drawing.card(WIDTH / 2, 138, 350, "sending", ["all-reduce: count, mean, variance", shared])
    lonely = ", ".join(minus(round(value, 3)) for value in alone[0].flatten().tolist())
    drawing.words(WIDTH / 2, 309, f"Without it, both get {lonely}.", anchor="middle", bold=True)
    return drawing.text(321)


def draw_vote() -> str:
    """How both ranks of beyond/survive stop after the same step, and neither waits."""
    drawing = Drawing(
        "Both ranks stop after the same step",
        "Rank 1 receives SIGTERM during step 8. After step 8, both vote, and train step 9 while "
        "the votes travel. After step 9, both read that one has received SIGTERM: rank 0 saves a "
        "checkpoint with its checksum, and both end with status 0.",
    )
    left, wide, rows = 72, 128, (34, 148)
    second, third = left + wide + 8, left + 2 * (wide + 8)
    for rank, y in enumerate(rows):
        kind = f"rank {rank}"
        drawing.words(4, y + 23, kind, kind, bold=True)
        for x, step in ((left, 8), (second, 9)):
            drawing.button(x, y, wide, HIGH, kind, f"step {step}")
        drawing.box(third, y, wide, HIGH, "none", INK)
        text = "ends" if rank else "saves, ends"
        drawing.words(third + wide / 2, y + 23, text, anchor="middle", bold=True)
    drawing.words(second - 4, 20, "both vote", "sending", "middle")
    drawing.words(third - 4, 20, "both read: stop", "sending", "middle")
    drawing.box(second, 92, wide, HIGH - 2, "none", "sending")
    drawing.words(second + wide / 2, 114, "the votes", "sending", "middle", bold=True)
    for y, end in ((70, 90), (146, 126)):
        drawing.line(second + 12, y, second + 12, end, arrow=True)
        drawing.line(third - 20, end, third - 20, y, arrow=True)
    drawing.line(left + wide / 2, 218, left + wide / 2, 185, arrow=True)
    drawing.words(left + wide / 2, 236, "SIGTERM", "wrong", "middle", bold=True)
    drawing.words(second, 208, "Both train step 9,", bold=True)
    drawing.words(second, 230, "and none waits for the votes.")
    return drawing.text(248)
