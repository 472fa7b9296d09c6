"""How a rank gets its part of the samples: one of the styles of pieces/loaders.py."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from tasks import Choices, Task, cells

STYLES = (
    *("DistributedSampler", "unshuffled", "drop_last", "iterator over epochs", "strided subset"),
    *("block of each rank", "loader made each epoch", "stream", "own sampler", "batch sampler"),
    *("own generator", "batch_size=None"),
)
INDEXED = ("order[rank::world]", "order[i : i + B]")  # no loader
OF_TENSORS = ("own generator", "batch_size=None", *INDEXED)
WORKERS = {
    "0": "",
    "1": ", num_workers=1",
    "2": ", num_workers=2",
    "1, persistent": ", num_workers=1, persistent_workers=True",
    "2, prefetch": ", num_workers=2, prefetch_factor=4",
}
OF_ONE_RANK = r"(?<![.\w])(loader|sampler|part|size|order|stream)\b(?!=\w)"  # and no keywords


@dataclass
class Loader:
    setup: list[str]
    epoch: list[str]
    batches: str  # what the loop goes over: `for step, batch in enumerate(...)`
    index: list[str] = field(default_factory=list)  # makes the batch of it, where it is none yet
    prelude: list[str] = field(default_factory=list)
    varying: bool = False


class Style(NamedTuple):
    """The cells of one style, in which the rank and what goes with it are still to be filled in."""

    name: str
    batch: str  # the local batch size, by the name `world`
    says_who: bool  # the sampler is told rank and number of ranks, and does not ask
    values: dict[str, str]  # values of holes that are the same on all ranks

    def texts(self, field: str) -> list[str]:
        of_field = [cell for cell in cells("loaders") if cell.name == field]
        return [cell.text for cell in of_field if cell.holds({"data": self.name})]

    def lines(self, field: str, rank: str = "rank", ranks: str = "world") -> list[str]:
        share = f", num_replicas={ranks}, rank={rank}" if self.says_who else ""
        batch = self.batch.replace("world", ranks)
        own = {"RANK": rank, "RANKS": ranks, "LOCAL_BATCH": batch, "SHARE": share}
        lines = []
        for text in self.texts(field):
            for hole, value in (own | self.values).items():
                text = re.sub(rf"(,\s*\*\*)?\b{hole}\b", value, text)
            lines += re.split(r"\n(?=\w)", text)  # one for each statement
        return lines

    def lines_of_both(self, field: str) -> list[str]:
        """One after the other, with the names of what belongs to one rank."""
        both = []
        for rank in "01":
            lines = self.lines(field, rank, "2")
            both += [re.sub(OF_ONE_RANK, rf"\1_{rank}", line) for line in lines]
        return both


def loader(choose: Choices, task: Task, batch: str, reference: bool, guarded: bool) -> Loader:
    """The loader of a rank, or, as a reference, one that joins the samples of two ranks."""
    name, workers = style_and_workers(choose, task, guarded)
    pin = ", pin_memory=False" if choose.random.random() < 0.2 and workers != "0" else ""
    says_who = choose.random.random() < 0.5 or reference
    collate = f", collate_fn={task.collate}" if task.collate else ""
    values = {
        "WORKERS": WORKERS[workers] + pin,
        "SHUFFLE": "False" if name == "unshuffled" else "True",
        "TENSORS": f"({task.tensors})",
        "COLLATE": ", collate_fn=list" if reference else collate,
    }
    if name in INDEXED:
        style = Style(name, f"({batch})", says_who, values)
        rows = style.lines("rows of both" if reference else "rows")
        taken = ", ".join(f"{tensor}[rows]" for tensor in task.tensors.split(", "))
        [batches] = style.texts("BATCHES")
        return Loader([], style.lines("epoch"), batches, [*rows, f"batch = {taken}"])
    style = Style(name, batch, says_who, values)
    classes = style.texts("classes")
    if reference:
        join = [joining_line(name, task)]
        is_made_each_epoch = not style.texts("setup") or name in OF_TENSORS
        setup, epoch = style.lines_of_both("setup"), style.lines_of_both("epoch")
        (epoch if is_made_each_epoch else setup).extend(join)
        made = Loader(setup, epoch, "loader", prelude=[*classes, *style.texts("joined")])
    else:
        made = Loader(style.lines("setup"), style.lines("epoch"), "loader", prelude=classes)
    if name == "iterator over epochs":
        made.batches = "islice(stream, STEPS)"
    made.varying = name == "batch sampler"
    return made


def style_and_workers(choose: Choices, task: Task, guarded: bool) -> tuple[str, str]:
    styles = [*STYLES, *INDEXED]
    styles = [style for style in styles if task.tensors or style not in OF_TENSORS]
    if task.fixed_batch:
        styles.remove("batch sampler")
    style = choose("data", *styles)
    keys = [name for name in WORKERS if guarded and style not in ("own generator", *INDEXED)] or [
        "0"
    ]
    if style in ("stream", "batch_size=None", "own sampler", "batch sampler"):
        keys = [name for name in keys if "persistent" not in name]  # they would see no new epoch
    return style, choose("workers", "0", "0", *keys)


def joining_line(style: str, task: Task) -> str:
    """One loader of those of both ranks."""
    if style in OF_TENSORS:
        return "loader = map(interleaved_rows, loader_0, loader_1)"
    collate = task.collate or "default_collate"
    if style == "iterator over epochs":
        return f"stream = iter(Interleaved([stream_0, stream_1], {collate}))"
    return f"loader = Interleaved([loader_0, loader_1], {collate})"
