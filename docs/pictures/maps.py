"""Maps: the way through the course, and the six steps of a script of one's own."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from docs.pictures.svg import INK, NARROW, Drawing
from local_ranks.chapters import ROOT

CONVERT = ROOT / "beyond" / "convert"
HIGH = 54  # of a stop


class Bar(NamedTuple):
    """A part of a stop's small timeline: its begin and end in percent, and how far down it lies."""

    kind: str
    begin: float
    end: float
    down: float


def two_ranks(*bars: tuple[str, float, float, float]) -> list[Bar]:
    """The same bars for two ranks, one below the other."""
    return [Bar(kind, begin, end, 20 * r + down) for r in (0, 1) for kind, begin, end, down in bars]


class Stop(NamedTuple):
    name: str
    about: str
    bars: Sequence[Bar]
    may_wait: bool = False


STOPS = (
    Stop(
        "01 single GPU",
        "what goes wrong",
        [Bar("forward", 0, 45, 10), Bar("backward", 47, 100, 10)],
    ),
    Stop(
        "02 DataParallel",
        "one line; why not",
        [
            Bar("sending", 0, 12, 10),
            Bar("forward", 14, 52, 0),
            Bar("forward", 24, 62, 20),
            Bar("backward", 66, 100, 10),
        ],
        may_wait=True,
    ),
    Stop(
        "03 by hand",
        "mean of gradients",
        two_ranks(
            ("forward", 0, 22, 0),
            ("backward", 24, 52, 0),
            *(("sending", begin, begin + 9, 0) for begin in (56, 68, 80, 92)),
        ),
    ),
    Stop(
        "04 DDP, torchrun",
        "the same, faster",
        two_ranks(("forward", 0, 22, 0), ("backward", 24, 56, 0), ("sending", 36, 64, 9)),
    ),
    Stop(
        "05 AMP, SyncBN",
        "16 bits, whole batch",
        two_ranks(("forward", 0, 14, 0), ("backward", 16, 38, 0), ("sending", 24, 44, 9)),
        may_wait=True,
    ),
    Stop("notebook 03", "all stages agree", two_ranks(("same", 30, 70, 6))),
)
FILES = {3: ("minimal.py", "45 lines to read"), 4: ("template.py", "150 to take home")}
YOURS = (
    ("convert", "six small steps"),
    ("prove", "is it right?"),
    ("survive", "runs for days"),
)
LATER = (
    ("forecast", "how many GPUs pay?"),
    ("shard", "the model does not fit"),
    ("local_sgd", "the network is slow"),
    ("puzzles", "find the mistake"),
)


def stop(drawing: Drawing, x: float, y: float, width: float, name: str, about: str) -> None:
    drawing.box(x, y, width, HIGH, "none", INK)
    drawing.words(x + width / 2, y + 23, name, anchor="middle", bold=True)
    drawing.words(x + width / 2, y + 44, about, anchor="middle")


def draw_course() -> str:
    """Where a reader is, what the two hours are, and where a script of one's own comes in."""
    stages = "; ".join(f"{each.name}: {each.about}" for each in STOPS)
    roads = "; ".join(f"{name}: {about}" for name, about in (*YOURS, *LATER))
    about = f"Two hours: {stages}. Then: {roads}."
    drawing = Drawing("The map of the course", about, NARROW)
    left, wide, right, narrow, step = 44, 252, 320, 156, HIGH + 12
    drawing.button(4, 4, NARROW - 8, 34, "you", "You are here: the first page")
    top = 62
    end = top + step * len(STOPS) - 12
    for number, (name, text, bars, may_wait) in enumerate(STOPS):
        y = top + step * number
        above = 38 if number == 0 else y - 12
        drawing.line(left + 40, above, left + 40, y - 2, arrow=True)
        drawing.box(left, y, wide, HIGH, "none", INK, dashes="6 4" if may_wait else "")
        for kind, begin, stops, down in bars:
            high = 14 if down % 20 in (0, 10) else 6
            if kind == "sending" and not down % 20:
                high = 12
            drawing.box(left + 8 + 0.62 * begin, y + 10 + down, 0.62 * (stops - begin), high, kind)
        drawing.words(left + 82, y + 23, name, bold=True)
        drawing.words(left + 82, y + 44, text)
        if number in FILES:
            stop(drawing, right, y, narrow, *FILES[number])
            drawing.line(left + wide + 2, y + HIGH / 2, right - 3, y + HIGH / 2, arrow=True)
    drawing.line(14, 38, 14, end)
    drawing.line(14, end, 22, end)
    drawing.words_up(34, (top + end) / 2, "two hours")
    middle = right + narrow / 2
    files = [top + step * number for number in FILES]
    drawing.line(middle, 38, middle, files[0] - 3, arrow=True)
    drawing.words(middle - 10, 96, "in a hurry", anchor="end")
    drawing.line(middle, files[0] + HIGH, middle, files[1] - 3, arrow=True)
    y = end + 26
    drawing.line(left + 40, end, left + 40, y - 3, arrow=True)
    drawing.line(middle, files[1] + HIGH, middle, y - 3, arrow=True)
    drawing.button(4, y, NARROW - 8, 34, "you", "Your own script")
    y += 44
    for number, (name, text) in enumerate(YOURS):
        stop(drawing, 4 + 163 * number, y, 146, name, text)
        if number:
            drawing.line(4 + 163 * number - 16, y + HIGH / 2, 163 * number + 1, y + HIGH / 2, True)
    y += HIGH + 30
    drawing.words(4, y, "When you need it", bold=True)
    y += 10
    for number, (name, text) in enumerate(LATER):
        row, column = divmod(number, 2)
        stop(drawing, 4 + 242 * column, y + (HIGH + 10) * row, 230, name, text)
    y += 2 * (HIGH + 10) + 8
    drawing.legend(y, ("forward", "backward", "sending"))
    drawing.box(350, y - 1, 28, 16, "none", INK, dashes="6 4")
    drawing.words(386, y + 13, "may wait")
    return drawing.text(y + 24)


STEPS = (
    "Start: init_process_group",
    "Data: DistributedSampler",
    "Model: DistributedDataParallel",
    "Loss: divided over all ranks",
    "Evaluation: all_reduce of sums",
    "State: only rank 0 saves",
)


def verdicts() -> dict[str, list[str]]:
    """What prove says after each step, by row: the table of convert's page, which a test tries."""
    text = (CONVERT / "README.md").read_text()
    _, _, rows = text.partition("| row of prove's table |")
    found = re.findall(r"^\| `([\w ]+)` \|(.+)\|$", rows, flags=re.MULTILINE)[:13]
    return {name: [cell.strip(" *") for cell in cells.split("|")] for name, cells in found}


def draw_convert() -> str:
    """The six steps of convert: what each adds, and which rows of prove are WRONG after it."""
    table = verdicts()
    drawing = Drawing("Six steps from one GPU to many", "", NARROW)
    drawing.words(4, 20, "your script, for one GPU", bold=True)
    drawing.words(NARROW - 4, 20, "new lines", anchor="end")
    top, high = 40, 58
    drawing.line(20, 28, 20, top + high * len(STEPS) - 4, arrow=True)
    for number, name in enumerate(STEPS):
        y = top + high * number
        diff = (CONVERT / "classifier" / "steps" / f"{number + 1}.diff").read_text()
        added = sum(line.startswith("+") for line in diff.splitlines())
        drawing.button(6, y, 28, 28, "you", str(number + 1))
        drawing.words(46, y + 19, name, bold=True)
        drawing.words(NARROW - 4, y + 19, f"+{added}", anchor="end")
        wrong = [row for row, cells in table.items() if cells[number] == "WRONG"]
        before = {row: cells[number - 1] if number else "" for row, cells in table.items()}
        cured = [row for row, state in before.items() if state == "WRONG" and row not in wrong]
        if number and not cured:
            cured = [
                row for row in table if (before[row], table[row][number]) == ("warning", "right")
            ][:1]
        x = 46.0
        for kind, mark, rows in (("right", "✓", cured), ("wrong", "✗", wrong)):
            if rows:
                text = f"{mark} {', '.join(rows)}"
                drawing.words(x, y + 41, text, kind)
                x += 8.6 * len(text) + 16
        drawing.description += f"{number + 1}. {name}: WRONG are {', '.join(wrong) or 'none'}. "
    y = top + high * len(STEPS)
    drawing.words(4, y + 16, "your script, for many GPUs: nothing WRONG", bold=True)
    drawing.words(4, y + 42, "what prove says after each step: ✓ right, ✗ WRONG")
    return drawing.text(y + 54)
