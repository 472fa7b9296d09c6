# How a rank gets its part of the samples, in the styles of many authors.

# In a reference, the names of what belongs to one rank end with its number: loader_0, loader_1.

# %% setup, if data is DistributedSampler or unshuffled or iterator over epochs
sampler = DistributedSampler(train_set, **SHARE, shuffle=SHUFFLE, seed=3)
loader = DataLoader(train_set, batch_size=LOCAL_BATCH, sampler=sampler, **COLLATE, **WORKERS)
# %% setup, if data is drop_last
sampler = DistributedSampler(train_set, **SHARE, shuffle=SHUFFLE, seed=3, drop_last=True)
loader = DataLoader(
    train_set, batch_size=LOCAL_BATCH, sampler=sampler, **COLLATE, **WORKERS, drop_last=True
)
# %% epoch, if data is DistributedSampler or drop_last
sampler.set_epoch(epoch)


# %% classes, if data is iterator over epochs
def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


# %% setup, if data is iterator over epochs
stream = forever(loader, sampler)

# %% setup, if data is strided subset
part = Subset(train_set, range(RANK, len(train_set), RANKS))
loader = DataLoader(
    part,
    batch_size=LOCAL_BATCH,
    shuffle=True,
    generator=torch.Generator().manual_seed(11),
    **COLLATE,
    **WORKERS,
)

# %% setup, if data is block of each rank
size = len(train_set) // RANKS
part = Subset(train_set, list(range(RANK * size, (RANK + 1) * size)))
order = torch.Generator().manual_seed(11 + RANK)
loader = DataLoader(part, LOCAL_BATCH, shuffle=True, generator=order, **COLLATE, **WORKERS)

# %% epoch, if data is loader made each epoch
shuffled = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch))
part = Subset(train_set, shuffled[RANK::RANKS].tolist())
loader = DataLoader(part, batch_size=LOCAL_BATCH, **COLLATE, **WORKERS)


# %% classes, if data is stream
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


# %% setup, if data is stream
stream = Stream(train_set, RANK, RANKS)
loader = DataLoader(stream, batch_size=LOCAL_BATCH, **COLLATE, **WORKERS)
# %% epoch, if data is stream
stream.epoch = epoch


# %% classes, if data is own sampler
class RankSampler(Sampler):
    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def __len__(self):
        return self.count // self.world

    def __iter__(self):
        generator = torch.Generator().manual_seed(17 + self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        return iter(order[self.rank :: self.world])


# %% setup, if data is own sampler
sampler = RankSampler(len(train_set), RANK, RANKS)
loader = DataLoader(train_set, batch_size=LOCAL_BATCH, sampler=sampler, **COLLATE, **WORKERS)
# %% epoch, if data is own sampler
sampler.epoch = epoch


# %% classes, if data is batch sampler
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


# %% setup, if data is batch sampler
sampler = VaryingBatches(len(train_set), RANK, RANKS)
loader = DataLoader(train_set, batch_sampler=sampler, **COLLATE, **WORKERS)
# %% epoch, if data is batch sampler
sampler.epoch = epoch


# %% classes, if data is own generator
def batches(samples, rank, world, epoch):
    x, y = samples
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for start in range(0, len(x), GLOBAL_BATCH):
        rows = order[start : start + GLOBAL_BATCH][rank::world]
        yield x[rows], y[rows]


# %% epoch, if data is own generator
loader = batches(TENSORS, RANK, RANKS, epoch)


# %% classes, if data is batch_size=None
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


# %% setup, if data is batch_size=None
stream = Batches(TENSORS, RANK, RANKS)
loader = DataLoader(stream, batch_size=None, **WORKERS)
# %% epoch, if data is batch_size=None
stream.epoch = epoch

# No loader: the loop goes over `BATCHES`, and `rows` are those of this rank, or those of both.

# %% epoch, if data is order[rank::world] or order[i : i + B]
order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch))
# %% BATCHES, if data is order[rank::world]
order.split(GLOBAL_BATCH)
# %% rows, if data is order[rank::world]
rows = batch[RANK::RANKS]
# %% rows of both, if data is order[rank::world]
rows = batch
# %% BATCHES, if data is order[i : i + B]
range(0, len(train_set), GLOBAL_BATCH)
# %% rows, if data is order[i : i + B]
first = batch + RANK * LOCAL_BATCH
rows = order[first : first + LOCAL_BATCH]
# %% rows of both, if data is order[i : i + B]
both = order[batch : batch + GLOBAL_BATCH].chunk(2)
rows = torch.stack(both, 1).flatten()

# What joins the loaders of both ranks in a reference.


# %% joined
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
