# ruff: noqa: E501  they are lines of scripts
"""How a rank gets its part of the samples, in the styles of many authors.

In these lines {R} and {W} are the rank and the number of ranks, {_} ends the names of what belongs
to one rank: empty in a script, _0 and _1 where one process makes the loaders of both ranks.
"""

from dataclasses import dataclass, field

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
OF_TENSORS = ("own generator", "batch_size=None")
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
    prelude: list[str] = field(default_factory=list)
    varying: bool = False
    made_each_epoch: bool = False


def loader(choose: Choices, task: Task, batch: str, reference: bool, guarded: bool) -> Loader:
    """The loader of a rank, or, as a reference, one that joins the samples of two ranks."""
    styles = [style for style in STYLES if task.tensors or style not in OF_TENSORS]
    if task.fixed_batch:
        styles.remove("batch sampler")
    style = choose("data", *styles)
    keys = [name for name in WORKERS if guarded and style != "own generator"] or ["0"]
    if style in ("stream", "batch_size=None", "own sampler", "batch sampler"):
        keys = [name for name in keys if "persistent" not in name]  # they would see no new epoch
    workers = choose("workers", "0", "0", *keys)
    pin = ", pin_memory=False" if choose.random.random() < 0.2 and workers != "0" else ""
    says_who = choose.random.random() < 0.5 or reference
    tensors = style in OF_TENSORS
    collate = f", collate_fn={task.collate}" if task.collate else ""
    shuffle = "False" if style == "unshuffled" else "True"
    setup, epoch, prelude = STYLES[style]

    def lines(templates: list[str], rank: str, world: str, ending: str) -> list[str]:
        values = {name: name + ending for name in NAMES}
        values |= {
            "R": rank,
            "W": world,
            "B": batch.replace("world", world),
            "K": WORKERS[workers] + pin,
        }
        values |= {"SHUFFLE": shuffle, "TENSORS": task.tensors}
        values["C"] = ", collate_fn=list" if reference else collate
        values["SHARE"] = f", num_replicas={world}, rank={rank}" if says_who else ""
        return [template.format(**values) for template in templates]

    classes = [prelude] if prelude else []
    if not reference:
        made = Loader(
            lines(setup, "rank", "world", ""), lines(epoch, "rank", "world", ""), "loader", classes
        )
    else:
        both = [lines(setup, str(rank), "2", f"_{rank}") for rank in range(2)]
        epochs = [lines(epoch, str(rank), "2", f"_{rank}") for rank in range(2)]
        name = "stream" if style == "iterator over epochs" else "loader"
        join = f"{name} = Interleaved([{name}_0, {name}_1], {task.collate or 'default_collate'})"
        if tensors:
            join = f"{name} = map(interleaved_rows, {name}_0, {name}_1)"
        if name == "stream":
            join = f"stream = iter({join.removeprefix('stream = ')})"
        in_epoch = not setup or tensors
        made = Loader(
            [*both[0], *both[1], *([] if in_epoch else [join])],
            [*epochs[0], *epochs[1], *([join] if in_epoch else [])],
            "loader",
            [*classes, INTERLEAVED],
        )
    if style == "iterator over epochs":
        made.batches = "islice(stream, STEPS)"
    made.varying = style == "batch sampler"
    made.made_each_epoch = not setup
    return made
