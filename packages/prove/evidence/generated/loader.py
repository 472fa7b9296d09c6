"""Write the loader of a rank in one of the styles of pieces/loaders.py."""

import re
from dataclasses import dataclass, field

from evidence.generated.cells import fill, holes_of, texts
from evidence.generated.choices import INDEXED, OF_TENSORS

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
    setup: str
    epoch: str
    batches: str  # the iterable of the loop: `for step, batch in enumerate(...)`
    index: str = ""  # turns it into a batch, if it is none yet
    classes: list[str] = field(default_factory=list)


def loader(made: dict[str, str], tensors: str, collate: str, is_reference: bool) -> Loader:
    """Write the loader of a rank or, for the reference, one that joins the samples of two ranks.

    collate: the name of the collate function; "" if the script needs none.
    """
    style = made["data"]
    cells = holes_of("loaders", made)
    pin = ", pin_memory=False" if made["pin memory"] == "said" else ""
    collates = f", collate_fn={collate}" if collate else ""
    batch = "BATCH" if made["batch size"] == "per rank" else "GLOBAL_BATCH // RANKS"
    holes = {
        "WORKERS": WORKERS[made["workers"]] + pin,
        "SHUFFLE": "False" if style == "unshuffled" else "True",
        "TENSORS": f"({tensors})",
        "LOCAL_BATCH": f"({batch})" if style in INDEXED else batch,
        "COLLATE": ", collate_fn=list" if is_reference else collates,
        "SHARE": ", num_replicas=RANKS, rank=RANK" if made["rank"] == "said" else "",
        "RANK": "rank",
        "RANKS": "world",
    }

    def of_rank(name: str) -> str:
        return fill(cells[name], holes)

    def of_both(name: str) -> str:
        """Write the loaders of both ranks one after another, with different names."""
        both = []
        for rank in "01" if cells[name] else "":
            share = ", num_replicas=RANKS, rank=RANK"
            lines = fill(cells[name], holes | {"SHARE": share, "RANK": rank, "RANKS": "2"})
            both.append(re.sub(OF_ONE_RANK, rf"\1_{rank}", lines))
        return "\n".join(both)

    if style in INDEXED:
        rows = of_rank("ROWS_OF_BOTH" if is_reference else "ROWS")
        taken = ", ".join(f"{tensor}[rows]" for tensor in tensors.split(", "))
        return Loader("", of_rank("EPOCH"), cells["BATCHES"], f"{rows}\nbatch = {taken}")
    classes = texts("loaders", "classes", made)
    batches = "islice(stream, STEPS)" if style == "iterator over epochs" else "loader"
    if not is_reference:
        return Loader(of_rank("SETUP"), of_rank("EPOCH"), batches, classes=classes)
    setup, epoch, joined = of_both("SETUP"), of_both("EPOCH"), joining_line(style, collate)
    if setup and style not in OF_TENSORS:
        setup = f"{setup}\n{joined}"
    else:  # it is made in each epoch
        epoch = f"{epoch}\n{joined}"
    return Loader(setup, epoch, batches, classes=[*classes, *texts("loaders", "joined", made)])


def joining_line(style: str, collate: str) -> str:
    """Join the loaders of both ranks into one."""
    if style in OF_TENSORS:
        return "loader = map(interleaved_rows, loader_0, loader_1)"
    collate = collate or "default_collate"
    if style == "iterator over epochs":
        return f"stream = iter(Interleaved([stream_0, stream_1], {collate}))"
    return f"loader = Interleaved([loader_0, loader_1], {collate})"
