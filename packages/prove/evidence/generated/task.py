"""What a script learns: samples, collate function, model and loss, in the styles of many authors.

Each task is a file of pieces/: a script in cells. A cell `# %% forward, if model is lstm` has lines
of a field of Task, and is left out if its condition does not hold; `# %% from samples` stands for
the cells of samples.py. Cells called `choices` say what is drawn, in this order, and `facts` are
more fields. A name in capitals is a hole, which the cell of this name fills. A comment that begins
a line is about the pieces, and gets into no script.

Each task ends in a `loss` whose mean over the ranks is the loss of one process that has the samples
of all ranks. ` * WORLD` becomes ` * world` where the ranks take the mean of their gradients, and
nothing where they take the sum.
"""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PIECES = Path(__file__).resolve().parent / "pieces"
TASKS = (
    *("points", "words", "contrastive", "images", "detection", "diffusion", "bags", "distill"),
    *("vae", "ctc", "mixup", "moco", "gan", "sparse", "complex"),
)


class Choices:
    """Draws from one seed, and remembers under which name."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made: dict[str, str] = {}

    def __call__(self, name: str, *options: str) -> str:
        self.made[name] = self.random.choice(options)
        return self.made[name]


@dataclass
class Task:
    build: list[str]  # makes `net`
    forward: list[str]  # lines from the unpacked batch to `loss`
    unpack: list[str]  # lines that unpack `batch`
    count: str  # a number of the local batch: a loss divided by it is a mistake
    prelude: list[str] = field(default_factory=list)  # classes and functions
    collate: str = ""
    after_wrap: list[str] = field(default_factory=list)  # when `model` exists
    after_step: list[str] = field(default_factory=list)
    logged: str = "loss.detach()"
    evaluate: list[str] = field(default_factory=list)  # `value` of `n` test samples
    tensors: str = ""  # the data set's tensors, if its samples are nothing but rows of them
    draws: bool = False
    batchnorm: bool = False
    own_state: bool = False  # outside of the model: a teacher, a queue
    frozen: bool = False
    fixed_batch: bool = False  # the batches must not vary
    divides: bool = False  # forward divides by a number of all ranks, so WORLD is used
    generators: list[str] = field(default_factory=list)  # generators that are made before the loop
    gan: bool = False  # two models and two optimizers
    layout: str = ""  # a parameter's ("complex") or its gradient's ("sparse"), if not all know it
    functional: bool = False  # torch.func may differentiate it


class Cell(NamedTuple):
    name: str
    condition: str  # "": it holds
    text: str

    def holds(self, made: dict[str, str]) -> bool:
        choice, _, values = self.condition.partition(" is ")
        return not choice or made[choice] in values.split(" or ")

    @property
    def assigned(self) -> dict[str, Any]:
        """The values of these assignments, under their names."""
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


def task_of(name: str, choose: Choices) -> Task:
    """The task of this file, with what is chosen of it."""
    known = list(cells(name))
    for cell in known:
        if cell.name == "choices" and cell.holds(choose.made):
            for choice, options in cell.assigned.items():
                choice = choice.replace("_", " ")
                if isinstance(options, str):
                    choose.made[choice] = options
                else:
                    choose(choice, *options)
    used = [cell for cell in known if cell.holds(choose.made)]
    holes = {cell.name: cell.text for cell in used if cell.name.isupper()}

    def texts(field: str) -> list[str]:
        of_field = [cell.text for cell in used if cell.name == field]
        return [
            re.sub(r"\b[A-Z]+\b", lambda name: holes.get(name[0], name[0]), x) for x in of_field
        ]

    def lines(field: str) -> list[str]:
        return [line for text in texts(field) for line in text.split("\n")]

    facts: dict[str, Any] = {}
    for cell in used:
        if cell.name == "facts":
            facts |= cell.assigned
    return Task(
        build=lines("build"),
        forward=lines("forward"),
        unpack=lines("unpack"),
        count=holes["COUNT"],
        prelude=texts("classes"),
        collate="collate" if any("def collate(" in text for text in texts("classes")) else "",
        after_wrap=lines("after_wrap"),
        after_step=lines("after_step"),
        evaluate=lines("evaluate"),
        generators=lines("generators"),
        **facts,
    )
