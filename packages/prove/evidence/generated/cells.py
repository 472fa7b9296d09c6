"""Put a script together from the cells in the files of pieces/.

A cell `# %% forward, if model is lstm` is left out if its condition does not hold; `# %% from
samples` stands for the cells of samples.py. A name in capitals is a hole, which the cells of this
name fill. A comment that begins a line is about the pieces, and gets into no script.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

PIECES = Path(__file__).parent / "pieces"


class Cell(NamedTuple):
    name: str
    condition: str  # "" always holds
    text: str

    def holds(self, made: dict[str, str]) -> bool:
        choice, _, values = self.condition.partition(" is ")
        return not choice or made.get(choice) in values.split(" or ")

    @property
    def assigned(self) -> dict[str, Any]:
        """Return the values of these assignments by name."""
        values: dict[str, Any] = {}
        for line in ast.parse(self.text).body:
            if isinstance(line, ast.Assign | ast.AugAssign):
                target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                name, value = ast.unparse(target), ast.literal_eval(line.value)
                values[name] = values[name] + value if isinstance(line, ast.AugAssign) else value
        return values


def cells(file: str) -> Iterator[Cell]:
    _, *parts = re.split(r"^# %% (.+)\n", (PIECES / f"{file}.py").read_text(), flags=re.M)
    for head, text in zip(parts[::2], parts[1::2], strict=True):
        if head.startswith("from "):
            yield from cells(head.removeprefix("from "))
        else:
            name, _, condition = head.partition(", if ")
            lines = [line for line in text.split("\n") if not line.startswith("#")]
            yield Cell(name, condition, "\n".join(lines).strip())


def texts(file: str, name: str, made: dict[str, str]) -> list[str]:
    """List the cells of this name whose condition holds."""
    return [cell.text for cell in cells(file) if cell.name == name and cell.holds(made)]


def holes_of(file: str, made: dict[str, str]) -> dict[str, str]:
    """Return the text for a hole: the last cell in capitals, or all cells of this name."""
    holes: dict[str, str] = {}
    for cell in cells(file):
        hole = cell.name.upper().replace(" ", "_")
        before = holes.setdefault(hole, "")
        if cell.holds(made):
            is_first = not before or cell.name.isupper()
            holes[hole] = cell.text if is_first else f"{before}\n{cell.text}"
    return holes


def fill(text: str, holes: dict[str, str]) -> str:
    """Put these texts, whose own holes are filled too, in the place of their names.

    A hole that is alone in its line takes many lines, or none. An argument `**HOLE` takes the
    arguments that it stands for with the comma before them.
    """

    def filled(name: re.Match) -> str:
        return fill(holes[name[2]], holes) if name[2] in holes else name[0]

    lines: list[str] = []
    is_left_out = False
    for line in text.split("\n"):
        if is_left_out and not line:
            continue
        hole, depth = line.strip(), line[: len(line) - len(line.lstrip())]
        if hole not in holes:
            is_left_out = False
            lines.append(line)
            continue
        block = fill(holes[hole], holes)
        is_left_out = not block
        lines += indent(block, depth).split("\n") if block else []
    return re.sub(r"(,\s*\*\*)?\b([A-Z_]+)\b", filled, "\n".join(lines))
