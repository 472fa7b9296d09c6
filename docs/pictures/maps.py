"""Maps: the way through the course, and the six steps of a script of one's own."""

import re
from typing import NamedTuple

from docs.pictures.svg import INK, ON_DARK, WIDTH, Drawing
from local_ranks.chapters import ROOT

CONVERT = ROOT / "beyond" / "convert"
HIGH = 54  # of a stop


class Stop(NamedTuple):
    name: str
    about: str
    may_wait: bool = False


STOPS = (
    Stop("01 single GPU", "six things that go wrong"),
    Stop("02 DataParallel", "one line, but don't use it", may_wait=True),
    Stop("03 by hand", "the mean of all gradients"),
    Stop("04 DDP, torchrun", "the same, but faster"),
    Stop("05 AMP, SyncBN", "16 bits, global BatchNorm", may_wait=True),
    Stop("notebook 03", "which stages agree", may_wait=True),
)
FILES = {3: ("minimal.py", "DDP in 45 lines"), 4: ("template.py", "all in 150 lines")}
YOURS = (
    ("convert", "six small steps"),
    ("prove", "is it right?"),
    ("survive", "runs for days"),
)
LATER = (
    ("forecast", "how many GPUs pay?"),
    ("shard", "the model does not fit"),
    ("local_sgd", "slow network: talk less"),
    ("puzzles", "write it, find the mistake"),
)


LEFT, WIDE = 44, 252  # of the stops
RIGHT, LESS_WIDE = 320, 156  # of the files
TOP, STEP = 62, HIGH + 12
END = TOP + STEP * len(STOPS) - 12


def place(drawing: Drawing, x: float, y: float, width: float, name: str, about: str) -> None:
    drawing.box(x, y, width, HIGH, "none", INK)
    drawing.words(x + width / 2, y + 23, name, anchor="middle", bold=True)
    drawing.words(x + width / 2, y + 44, about, anchor="middle")


def draw_course() -> str:
    """Where a reader is, what the two hours are, and where a script of one's own comes in."""
    stages = "; ".join(f"{each.name}: {each.about}" for each in STOPS)
    roads = "; ".join(f"{name}: {about}" for name, about in (*YOURS, *LATER))
    about = f"Two hours: {stages}. Then: {roads}."
    drawing = Drawing("The map of the course", about)
    drawing.button(4, 4, WIDTH - 8, 34, "you", "You are here: the first page")
    draw_stops(drawing)
    draw_files(drawing)
    y = draw_roads(drawing, END + 26)
    drawing.box(4, y - 1, 28, 16, "you")
    drawing.words(40, y + 13, "the core")
    drawing.box(132, y - 1, 28, 16, "none", INK, dashes="6 4")
    drawing.words(168, y + 13, "may wait, if you are short of time")
    return drawing.text(y + 24)


def draw_stops(drawing: Drawing) -> None:
    for number, (name, about, may_wait) in enumerate(STOPS):
        y = TOP + STEP * number
        drawing.line(LEFT + 40, y - 12 if number else 38, LEFT + 40, y - 2, arrow=True)
        if may_wait:
            drawing.box(LEFT, y, WIDE, HIGH, "none", INK, dashes="6 4")
        else:
            drawing.box(LEFT, y, WIDE, HIGH, "you")
        color = INK if may_wait else ON_DARK
        drawing.words(LEFT + 14, y + 23, name, color, bold=True)
        drawing.words(LEFT + 14, y + 44, about, color)
    drawing.line(LEFT + 40, END, LEFT + 40, END + 23, arrow=True)
    drawing.line(14, 38, 14, END)
    drawing.line(14, END, 22, END)
    drawing.words_up(34, (TOP + END) / 2, "two hours")


def draw_files(drawing: Drawing) -> None:
    """The way of those who are in a hurry: the files to take, beside their stages."""
    middle, above = RIGHT + LESS_WIDE / 2, 38.0
    drawing.words(middle - 10, 96, "in a hurry", anchor="end")
    for number, names in FILES.items():
        y = TOP + STEP * number
        place(drawing, RIGHT, y, LESS_WIDE, *names)
        drawing.line(LEFT + WIDE + 2, y + HIGH / 2, RIGHT - 3, y + HIGH / 2, arrow=True)
        drawing.line(middle, above, middle, y - 3, arrow=True)
        above = y + HIGH
    drawing.line(middle, above, middle, END + 23, arrow=True)


def draw_roads(drawing: Drawing, y: float) -> float:
    """The roads beyond the stages, from y on; returns where they end."""
    drawing.button(4, y, WIDTH - 8, 34, "you", "Your own script")
    y += 44
    for number, (name, about) in enumerate(YOURS):
        x = 4 + 163 * number
        place(drawing, x, y, 146, name, about)
        if number:
            drawing.line(x - 16, y + HIGH / 2, x - 3, y + HIGH / 2, arrow=True)
    y += HIGH + 30
    drawing.words(4, y, "When you need it", bold=True)
    y += 10
    for number, (name, about) in enumerate(LATER):
        row, column = divmod(number, 2)
        place(drawing, 4 + 242 * column, y + (HIGH + 10) * row, 230, name, about)
    return y + 2 * (HIGH + 10) + 8


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
    table = text.partition("| row of prove's table |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| `([\w ]+)` \|(.+)\|$", table, flags=re.MULTILINE)
    return {name: [cell.strip(" *") for cell in cells.split("|")] for name, cells in found}


def cured_rows(table: dict[str, list[str]], number: int) -> list[str]:
    """The rows that this step cures: those that were WRONG before it, or else a warning."""
    if number == 0:
        return []
    changes = {row: (cells[number - 1], cells[number]) for row, cells in table.items()}
    cured = [row for row, (old, new) in changes.items() if old == "WRONG" != new]
    return cured or [row for row, change in changes.items() if change == ("warning", "right")][:1]


def draw_convert() -> str:
    """The six steps of convert: what each adds, and which rows of prove are WRONG after it."""
    table = verdicts()
    drawing = Drawing("Six steps from one GPU to many", "")
    drawing.words(4, 20, "your script, for one GPU", bold=True)
    drawing.words(WIDTH - 4, 20, "new lines", anchor="end")
    top, high = 40, 58
    end = top + high * len(STEPS)
    drawing.line(20, 28, 20, end - 4, arrow=True)
    for number, name in enumerate(STEPS):
        y = top + high * number
        diff = (CONVERT / "classifier" / "steps" / f"{number + 1}.diff").read_text()
        added = sum(line.startswith("+") for line in diff.splitlines()[2:])  # below the names
        drawing.button(6, y, 28, 28, "you", str(number + 1))
        drawing.words(46, y + 19, name, bold=True)
        drawing.words(WIDTH - 4, y + 19, f"+{added}", anchor="end")
        wrong = [row for row, cells in table.items() if cells[number] == "WRONG"]
        marks = (("right", "✓", cured_rows(table, number)), ("wrong", "✗", wrong))
        x = 46.0
        for kind, mark, rows in marks:
            if rows:
                text = f"{mark} {', '.join(rows)}"
                drawing.words(x, y + 41, text, kind)
                x += drawing.width_of(text) + 14
        drawing.description += f"{number + 1}. {name}: WRONG are {', '.join(wrong) or 'none'}. "
    drawing.words(4, end + 16, "your script, for many GPUs: nothing WRONG", bold=True)
    drawing.words(4, end + 42, "what prove says after each step: ✓ right, ✗ WRONG")
    return drawing.text(end + 54)
