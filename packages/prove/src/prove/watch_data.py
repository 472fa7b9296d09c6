"""Which samples does a rank draw, and in which order? The loaders are watched.

Each epoch is cut to a few batches, and the run ends when the third one begins.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from prove import generators
from prove.rank_run import RankRun, save_tensors, where, wrap
from prove.record import EVALUATION, LoaderRun

MOST_INDICES = 2_000_000  # more are not listed: a sampler may have no end
MOST_SIZES = 64  # of batches


def tensors_in(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    parts = nested if isinstance(nested, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def of_class(kind: type, plain: dict) -> Any:
    """A class of a library's own, as transformers' BatchEncoding, if it can be made from a dict."""
    try:
        return kind(plain)
    except TypeError:
        return plain


def mapped(function: Callable[[Tensor], Tensor], nested: Any) -> Any:
    """The same lists, tuples and mappings, with a function applied to each tensor.

    torch's tree_map would take a mapping of a class of its own for a leaf.
    """
    if isinstance(nested, Tensor):
        return function(nested)
    if isinstance(nested, Mapping):
        plain = {key: mapped(function, value) for key, value in nested.items()}
        return of_class(type(nested), plain)
    if isinstance(nested, tuple) and hasattr(nested, "_fields"):
        return type(nested)(*(mapped(function, value) for value in nested))
    if type(nested) in (list, tuple):
        return type(nested)(mapped(function, part) for part in nested)
    return nested


def as_double(nested: Any) -> Any:
    return mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, nested)


def copied(nested: Any) -> Any:
    return mapped(lambda tensor: tensor.detach().cpu().clone(), nested)


def checksum(tensor: Tensor) -> int:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(generators.bytes_of(values)) if values.numel() else 0


def has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows


def is_list_of_samples(batch: Any) -> bool:
    """As collate_fn=list makes it."""
    return isinstance(batch, list | tuple) and not any(isinstance(part, Tensor) for part in batch)


def batch_size_of(batch: Any) -> int:
    if is_list_of_samples(batch):
        return len(batch)
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 1)


def checksums(batch: Any) -> list[int]:
    """A number for the content of each sample."""
    if is_list_of_samples(batch):
        return [checksum(tensors_in(sample)[0]) for sample in batch if tensors_in(sample)]
    columns = [tensor for tensor in tensors_in(batch) if has_rows(tensor, batch_size_of(batch))]
    wide = [column for column in columns if column[0].numel() > 1] or columns
    return [checksum(row) for row in wide[0]] if wide else []


def fingerprint(dataset: Any) -> list[list[int]]:
    """Three samples, loaded with a fixed seed: do the ranks hold the same data set?"""
    read = getattr(dataset, "__getitems__", None) or (lambda chosen: dataset[chosen[0]])
    try:
        with generators.seeded(0):
            places = (0, len(dataset) // 2, len(dataset) - 1)
            return [[checksum(part) for part in tensors_in(read([i]))[:2]] for i in places]
    except Exception:  # a data set that cannot answer, a stream for example
        return []


def without_subsets(dataset: Any) -> tuple[Any, Tensor | None]:
    """The data set below all Subsets, and which of its samples these hold (None: all)."""
    if type(dataset) is not Subset:
        return dataset, None
    base, below = without_subsets(dataset.dataset)
    chosen = torch.as_tensor(list(dataset.indices), dtype=torch.long)
    return base, chosen if below is None else below[chosen]


class ListedSampler:
    """A batch sampler that is listed to its end before it gives its first batch."""

    def __init__(self, batches: Any, loader: Any, run: RankRun) -> None:
        self.batches, self.loader, self.run = batches, loader, run

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        loader_run: LoaderRun | None = getattr(self.loader, "prove_loader_run", None)
        if loader_run is None or loader_run.is_stream:
            yield from self.batches
            return
        iterator, listed, samples = iter(self.batches), [], 0
        for batch in iterator:
            listed.append(batch)
            samples += len(batch) if isinstance(batch, list | tuple) else 1
            if samples >= MOST_INDICES:
                break
        else:
            self.write(loader_run, listed)
        yield from listed
        yield from iterator

    def write(self, loader_run: LoaderRun, listed: list) -> None:
        batches = [batch if isinstance(batch, list | tuple) else [batch] for batch in listed]
        try:
            drawn = torch.tensor([int(i) for batch in batches for i in batch], dtype=torch.long)
        except (TypeError, ValueError):  # a sampler of keys that are no numbers
            return
        loader_run.batches = len(batches)
        loader_run.sizes = [len(batch) for batch in batches[:MOST_SIZES]]
        _, may_draw = without_subsets(self.loader.dataset)
        indices = drawn if may_draw is None else may_draw[drawn]
        settings, rank = self.run.settings, self.run.record.rank
        file = f"{settings.folder}/{settings.mode}.{rank}.pass{loader_run.number}.pt"
        save_tensors({"indices": indices, "may_draw": may_draw}, file)
        loader_run.samples_file = file  # now that it is whole


def batches_and_samples(loader: Any) -> tuple[int, int] | None:
    """How many a pass over a loader has; None: it does not say."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    try:
        samples = len(batches) * batches.batch_size if batches.drop_last else len(sampler)
        return len(batches), samples
    except (TypeError, NotImplementedError):  # a sampler without a length, as for a stream
        return None


def begin_loader_run(loader: Any, run: RankRun) -> LoaderRun:
    dataset, record = loader.dataset, run.record
    base, _ = without_subsets(dataset)
    is_stream = isinstance(dataset, IterableDataset)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    shuffle = getattr(sampler, "shuffle", None)
    earlier = [
        loader_run.fingerprint
        for loader_run in record.loader_runs
        if loader_run.dataset == id(dataset)
    ]
    loader_run = LoaderRun(
        number=len(record.loader_runs),
        loader=loader.prove_number,
        at=loader.prove_at,
        sampler=type(sampler).__name__,
        shuffle=None if shuffle is None else bool(shuffle),
        workers=loader.num_workers,
        batch_size=loader.batch_size,
        limit=run.settings.batches,
        dataset=id(dataset),
        dataset_length=None if is_stream or not hasattr(base, "__len__") else len(base),
        fingerprint=earlier[0] if earlier else fingerprint(base),
        is_stream=is_stream,
        with_gradients=torch.is_grad_enabled(),
        batches_and_samples=batches_and_samples(loader),
        steps_before=record.steps,
        collectives_before=len(record.collectives),
        backwards_before=run.model.backwards,
        generators=generators.digests(),
    )
    record.loader_runs.append(loader_run)
    return loader_run


def watch_fetches(run: RankRun, iterator: Iterator, loader_run: LoaderRun, most: int) -> Iterator:
    """The batches of one pass, until there are enough."""
    size = 0
    while True:
        loader_run.backwards = run.model.backwards - loader_run.backwards_before
        if loader_run.given >= most:
            return
        before = generators.digests()
        try:
            batch = next(iterator)
        except StopIteration:
            loader_run.ended = True
            return
        after = generators.digests()
        if loader_run.given:  # not at the first batch, where a sampler draws its seed
            changes = [old != new for old, new in zip(before, after, strict=True)]
            loader_run.drew = [a or b for a, b in zip(loader_run.drew, changes, strict=True)]
        full_size = loader_run.batch_size or 1
        last_but_one, size = size, batch_size_of(batch)
        if last_but_one % full_size or (
            size > full_size and size % full_size
        ):  # only the last may be smaller
            run.record.samples_elsewhere = True
        if loader_run.batches is None:
            loader_run.sizes.append(size)
        loader_run.given += 1
        if len(loader_run.contents) < run.settings.batches:
            loader_run.contents.append(checksums(batch))
        if loader_run.kept is not None:
            run.tensors["batches"][loader_run.kept].append((size, copied(batch)))
        run.note_event()
        run.current_loader_run, run.generators_after_fetch = loader_run, after
        if loader_run.with_gradients:
            run.model.keep_start()
        yield as_double(batch) if run.settings.float64 else batch


def most_batches(run: RankRun, training: bool) -> int:
    ranks = run.settings.world_size if run.replaying else 1  # one rank evaluates what all ranks did
    return run.settings.batches * ranks * (1 if training else EVALUATION)


def watch_loaders(run: RankRun) -> None:
    """Number the loaders, and list what their samplers draw."""
    index_sampler: Any = DataLoader._index_sampler
    loaders = 0

    @wrap(DataLoader, "__init__")
    def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal loaders
        original(self, *args, **kwargs)
        object.__setattr__(self, "prove_number", loaders)
        object.__setattr__(self, "prove_at", where())
        loaders += 1

    DataLoader._index_sampler = property(  # type: ignore[assignment]
        lambda self: ListedSampler(index_sampler.fget(self), self, run)
    )


def watch_passes(run: RankRun) -> None:
    @wrap(DataLoader, "__iter__")
    def iterate(original: Callable, self: Any) -> Any:
        training, loader_runs = torch.is_grad_enabled(), run.record.loader_runs
        trained = (loader_run.dataset for loader_run in loader_runs if loader_run.steps > 0)
        epochs = sum(dataset == id(self.dataset) for dataset in trained)
        if training and epochs:
            run.in_second_epoch = True
            if not run.replaying:
                run.model.end_epoch()
                if epochs >= 2 and run.joined:
                    run.leave()
        loader_run = begin_loader_run(self, run)
        if run.replaying and training and (fed := run.feeder.feed(self, loader_run)) is not None:
            return fed
        object.__setattr__(self, "prove_loader_run", loader_run)
        iterator = original(self)
        loader_run.base_seed = getattr(iterator, "_base_seed", None)
        if training and not run.replaying and not run.in_second_epoch:
            loader_run.kept = len(run.tensors["batches"])
            run.tensors["batches"].append([])
        return watch_fetches(run, iterator, loader_run, most_batches(run, training))


def watch_lengths(run: RankRun) -> None:
    @wrap(DataLoader, "__len__")
    def length(original: Callable, self: Any) -> int:
        if run.replaying and (batches := run.feeder.batches_of(self)) is not None:
            return int(batches)
        return min(original(self), most_batches(run, torch.is_grad_enabled()))


def install(run: RankRun) -> None:
    watch_loaders(run)
    watch_passes(run)
    watch_lengths(run)
