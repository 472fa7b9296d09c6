# ruff: noqa: E501  they are lines of scripts
"""How a rank gets its part of the samples, in the styles of many authors.

In these lines {R} and {W} are the rank and the number of ranks, {_} ends the names of what belongs
to one rank: empty in a script, _0 and _1 where one process makes the loaders of both ranks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from tasks import Choices, Task, block

STREAM = block("""
class Stream(IterableDataset):
    def __init__(self, samples, rank, world):
        self.samples, self.rank, self.world, self.epoch = samples, rank, world, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.samples), generator=generator).tolist()
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        part = self.rank * workers + (worker.id if worker else 0)
        for i in islice(order, part, None, self.world * workers):
            yield self.samples[i]
""")
BATCHES = block("""
def batches(samples, rank, world, epoch):
    x, y = samples
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for start in range(0, len(x), GLOBAL_BATCH):
        rows = order[start : start + GLOBAL_BATCH][rank::world]
        yield x[rows], y[rows]
""")
BATCHED = block("""
class Batches(Dataset):
    def __init__(self, samples, rank, world):
        self.x, self.y = samples
        self.rank, self.world, self.epoch = rank, world, 0

    def __len__(self):
        return len(self.x) // GLOBAL_BATCH

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.x), generator=generator)
        rows = order[i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH][self.rank :: self.world]
        return self.x[rows], self.y[rows]
""")
VARYING = block("""
class VaryingBatches:
    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def __len__(self):
        return self.count // GLOBAL_BATCH

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        start = 0
        for i in range(len(self)):
            size = (4, 12, 6, 10)[i % 4] * GLOBAL_BATCH // 8
            yield order[start : start + size][self.rank :: self.world]
            start += size
""")
SAMPLER = block("""
class RankSampler(Sampler):
    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def __len__(self):
        return self.count // self.world

    def __iter__(self):
        generator = torch.Generator().manual_seed(17 + self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        return iter(order[self.rank :: self.world])
""")
FOREVER = block("""
def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
""")
INTERLEAVED = block("""
class Interleaved:
    def __init__(self, loaders, collate):
        self.loaders, self.collate = loaders, collate

    def __len__(self):
        return len(self.loaders[0])

    def __iter__(self):
        for of_ranks in zip(*self.loaders, strict=True):
            yield self.collate([sample for row in zip(*of_ranks, strict=True) for sample in row])


def interleaved_rows(*batches):
    return tuple(torch.stack(parts, 1).flatten(0, 1) for parts in zip(*batches, strict=True))
""")

DISTRIBUTED = "{sampler} = DistributedSampler(train_set{SHARE}, shuffle={SHUFFLE}, seed=3)"
LOADER = "{loader} = DataLoader(train_set, batch_size={B}, sampler={sampler}{C}{K})"
GENERATOR = "torch.Generator().manual_seed(11)"
STYLES: dict[str, tuple[list[str], list[str], str]] = {  # before the loop, each epoch, classes
    "DistributedSampler": ([DISTRIBUTED, LOADER], ["{sampler}.set_epoch(epoch)"], ""),
    "unshuffled": ([DISTRIBUTED, LOADER], [], ""),
    "drop_last": (
        [DISTRIBUTED[:-1] + ", drop_last=True)", LOADER[:-1] + ", drop_last=True)"],
        ["{sampler}.set_epoch(epoch)"], "",
    ),
    "iterator over epochs": ([DISTRIBUTED, LOADER, "{stream} = forever({loader}, {sampler})"], [], FOREVER),
    "strided subset": (
        ["{part} = Subset(train_set, range({R}, len(train_set), {W}))",
         f"{{loader}} = DataLoader(\n    {{part}}, batch_size={{B}}, shuffle=True, generator={GENERATOR}{{C}}{{K}}\n)"],
        [], "",
    ),
    "block of each rank": (
        ["{size} = len(train_set) // {W}",
         "{part} = Subset(train_set, list(range({R} * {size}, ({R} + 1) * {size})))",
         "{order} = torch.Generator().manual_seed(11 + {R})",
         "{loader} = DataLoader({part}, {B}, shuffle=True, generator={order}{C}{K})"],
        [], "",
    ),
    "loader made each epoch": (
        [],
        ["shuffled = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch))",
         "{part} = Subset(train_set, shuffled[{R}::{W}].tolist())",
         "{loader} = DataLoader({part}, batch_size={B}{C}{K})"], "",
    ),
    "stream": (
        ["{stream} = Stream(train_set, {R}, {W})", "{loader} = DataLoader({stream}, batch_size={B}{C}{K})"],
        ["{stream}.epoch = epoch"], STREAM,
    ),
    "own sampler": (
        ["{sampler} = RankSampler(len(train_set), {R}, {W})", LOADER], ["{sampler}.epoch = epoch"], SAMPLER,
    ),
    "batch sampler": (
        ["{sampler} = VaryingBatches(len(train_set), {R}, {W})",
         "{loader} = DataLoader(train_set, batch_sampler={sampler}{C}{K})"],
        ["{sampler}.epoch = epoch"], VARYING,
    ),
    "own generator": ([], ["{loader} = batches(({TENSORS}), {R}, {W}, epoch)"], BATCHES),
    "batch_size=None": (
        ["{stream} = Batches(({TENSORS}), {R}, {W})", "{loader} = DataLoader({stream}, batch_size=None{K})"],
        ["{stream}.epoch = epoch"], BATCHED,
    ),
}  # fmt: skip
INDEXED = {  # no loader: what the loop goes over, its rows on a rank, and those of both ranks
    "order[rank::world]": ("order.split(GLOBAL_BATCH)", ["rows = batch[{R}::{W}]"], ["rows = batch"]),
    "order[i : i + B]": (
        "range(0, len(train_set), GLOBAL_BATCH)",
        ["first = batch + {R} * ({B})", "rows = order[first : first + {B}]"],
        ["both = order[batch : batch + GLOBAL_BATCH].chunk(2)", "rows = torch.stack(both, 1).flatten()"],
    ),
}  # fmt: skip
SHUFFLE = "order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch))"
OF_TENSORS = ("own generator", "batch_size=None", *INDEXED)
WORKERS = {
    "0": "",
    "1": ", num_workers=1",
    "2": ", num_workers=2",
    "1, persistent": ", num_workers=1, persistent_workers=True",
    "2, prefetch": ", num_workers=2, prefetch_factor=4",
}
NAMES = ("loader", "sampler", "part", "size", "order", "stream")


@dataclass
class Loader:
    setup: list[str]
    epoch: list[str]
    batches: str  # what the loop goes over: `for step, batch in enumerate(...)`
    index: list[str] = field(default_factory=list)  # makes the batch of it, where it is none yet
    prelude: list[str] = field(default_factory=list)
    varying: bool = False
    made_each_epoch: bool = False


class Templates(NamedTuple):
    """Lines of a loader, in which the rank and what goes with it are still to be filled in."""

    lines: list[str]
    batch: str  # the local batch size, by the name `world`
    says_who: bool  # the sampler is told rank and number of ranks, and does not ask
    values: dict[str, str]  # that are the same on all ranks

    def filled(self, rank: str, world: str, ending: str) -> list[str]:
        """ending: of the names of what belongs to one rank."""
        names = {name: name + ending for name in NAMES}
        share = f", num_replicas={world}, rank={rank}" if self.says_who else ""
        own = {"R": rank, "W": world, "B": self.batch.replace("world", world), "SHARE": share}
        return [line.format(**names, **own, **self.values) for line in self.lines]

    def of_both_ranks(self) -> list[str]:
        return [line for rank in range(2) for line in self.filled(str(rank), "2", f"_{rank}")]


def loader(choose: Choices, task: Task, batch: str, reference: bool, guarded: bool) -> Loader:
    """The loader of a rank, or, as a reference, one that joins the samples of two ranks."""
    style, workers = style_and_workers(choose, task, guarded)
    pin = ", pin_memory=False" if choose.random.random() < 0.2 and workers != "0" else ""
    says_who = choose.random.random() < 0.5 or reference
    if style in INDEXED:
        batches, *by_rank = INDEXED[style]
        names = {"R": "rank", "W": "world", "B": batch}
        rows = [line.format(**names) for line in by_rank[reference]]
        taken = ", ".join(f"{tensor}[rows]" for tensor in task.tensors.split(", "))
        return Loader([], [SHUFFLE], batches, [*rows, f"batch = {taken}"])
    collate = f", collate_fn={task.collate}" if task.collate else ""
    values = {
        "K": WORKERS[workers] + pin,
        "SHUFFLE": "False" if style == "unshuffled" else "True",
        "TENSORS": task.tensors,
        "C": ", collate_fn=list" if reference else collate,
    }
    setup, epoch, prelude = STYLES[style]
    classes = [prelude] if prelude else []
    before_loop, in_epoch = (Templates(lines, batch, says_who, values) for lines in (setup, epoch))
    if reference:
        join = [joining_line(style, task)]
        is_made_each_epoch = not setup or style in OF_TENSORS
        made = Loader(
            [*before_loop.of_both_ranks(), *([] if is_made_each_epoch else join)],
            [*in_epoch.of_both_ranks(), *(join if is_made_each_epoch else [])],
            "loader",
            prelude=[*classes, INTERLEAVED],
        )
    else:
        once, again = (each.filled("rank", "world", "") for each in (before_loop, in_epoch))
        made = Loader(once, again, "loader", prelude=classes)
    if style == "iterator over epochs":
        made.batches = "islice(stream, STEPS)"
    made.varying = style == "batch sampler"
    made.made_each_epoch = not setup
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
