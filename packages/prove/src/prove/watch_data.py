"""Which samples does a rank draw, and in which order? The loaders are watched.

Each epoch is cut to a few batches, and the run ends when the third one begins.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from prove import generators
from prove.rank_record import EVALUATION, LoaderRun
from prove.rank_run import RankRun, save_tensors, where, wrap
from prove.samples import (
    Collated,
    RecordedBatch,
    RecordingCollate,
    as_double,
    batch_size_of,
    checksum,
    checksums_of_rows,
    first_tensor,
    freeze,
)

MOST_INDICES = 2_000_000  # more are not listed: a sampler may have no end
END = object()  # of a loader
MOST_SIZES = 64  # of batches
MOST_MICRO_BATCHES = 32  # for each of --batches, where several make one step


def fingerprint(dataset: Any) -> tuple[list[list[int]], list[str]]:
    """Three samples, loaded with a fixed seed, and the names of their fields: do the ranks hold the
    same data set?"""

    def read(place: int) -> Any:
        if hasattr(dataset, "__getitems__"):
            return dataset.__getitems__([place])[0]
        return dataset[place]

    try:
        with generators.seeded(0):
            samples = [read(i) for i in (0, len(dataset) // 2, len(dataset) - 1)]
        names = [
            "" if isinstance(part, str) else name for name, part in fields_of(samples[0]).items()
        ]  # the path of a file may differ
        return [*map(checksums_of_fields, samples)], names
    except Exception:  # a data set that cannot answer, a stream for example
        return [], []


def checksums_of_fields(sample: Any) -> list[int]:
    """Of its first tensor, and of each field: which of them differs between the ranks?"""
    return [checksum(first_tensor(sample)), *map(checksum, fields_of(sample).values())]


def fields_of(sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): part for name, part in sample.items()}
    parts = sample if isinstance(sample, list | tuple) else [sample]
    return {f"field {number}": part for number, part in enumerate(parts)}


def without_subsets(dataset: Any) -> tuple[Any, Tensor | None]:
    """The data set below all Subsets, and which of its samples these hold (None: all)."""
    if not isinstance(dataset, Subset):
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
        file = f"{settings.folder}/{settings.name}.{rank}.pass{loader_run.number}.pt"
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


def number_of_dataset(loader: Any, length: int | None, run: RankRun) -> int:
    """Of the data set of a loader; the same for what the script makes anew for each epoch, at the
    same place."""
    if torch.is_grad_enabled():
        for earlier in run.record.loader_runs:
            is_same_place = earlier.at == loader.prove_at and earlier.loader != loader.prove_number
            if is_same_place and earlier.with_gradients and earlier.dataset_length == length:
                return earlier.dataset
    for number, dataset in enumerate(run.datasets):
        if dataset is loader.dataset:
            return number
    run.datasets.append(loader.dataset)
    return len(run.datasets) - 1


def begin_loader_run(loader: Any, run: RankRun) -> LoaderRun:
    dataset, record = loader.dataset, run.record
    base, _ = without_subsets(dataset)
    is_stream = isinstance(dataset, IterableDataset)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    shuffle = getattr(sampler, "shuffle", None)
    length = None if is_stream or not hasattr(base, "__len__") else len(base)
    number = number_of_dataset(loader, length, run)
    earlier = [
        (loader_run.fingerprint, loader_run.fields)
        for loader_run in record.loader_runs
        if loader_run.dataset == number
    ]
    of_samples, fields = earlier[0] if earlier else fingerprint(base)
    loader_run = LoaderRun(
        number=len(record.loader_runs),
        loader=loader.prove_number,
        at=loader.prove_at,
        sampler=type(sampler).__name__,
        shuffle=None if shuffle is None else bool(shuffle),
        workers=loader.num_workers,
        batch_size=loader.batch_size,
        limit=run.settings.batches,
        dataset=number,
        dataset_length=length,
        fingerprint=of_samples,
        is_stream=is_stream,
        with_gradients=torch.is_grad_enabled(),
        batches_and_samples=batches_and_samples(loader),
        steps_before=record.steps,
        collectives_before=len(record.collectives),
        backwards_before=run.model.backwards,
        generators=generators.digests(),
        fields=fields,
    )
    record.loader_runs.append(loader_run)
    return loader_run


def is_enough(run: RankRun, loader_run: LoaderRun, was_asked: bool) -> bool:
    """Has the script had its batches of this pass? Where several make one step, it gets more,
    but no more than its length, if the script has asked for that."""
    given, batches = loader_run.given, run.settings.batches
    if run.replaying or not loader_run.with_gradients:
        return given >= most_batches(run, loader_run.with_gradients)
    if given < batches:
        return False
    if given == batches and not was_asked:
        loader_run.accumulates = loader_run.backwards > 0 and loader_run.steps <= batches // 2
    if not loader_run.accumulates:
        return True
    return loader_run.steps >= batches or given >= MOST_MICRO_BATCHES * batches


def watch_fetches(
    run: RankRun, iterator: Iterator, loader_run: LoaderRun, loader: DataLoader
) -> Iterator:
    """The batches of one pass, until there are enough."""
    size, calls = 0, len(run.record.model_calls)
    looks_ahead = False
    while True:
        run.end_batch()
        loader_run.backwards = run.model.backwards - loader_run.backwards_before
        if loader_run.given == 1:
            looks_ahead = not loader_run.backwards and len(run.record.model_calls) == calls
        before, batch = generators.digests(), None
        enough = is_enough(run, loader_run, getattr(loader, "prove_was_asked", False))
        if not enough:
            batch = next(iterator, END)
            loader_run.ended = batch is END
        if enough or loader_run.ended:
            if looks_ahead and loader_run.with_gradients:
                begin_batch(run, loader_run, loader_run.given + 1, size)
            return
        after = generators.digests()
        if loader_run.given:  # not at the first batch, where a sampler draws its seed
            changes = [old != new for old, new in zip(before, after, strict=True)]
            loader_run.drew = [a or b for a, b in zip(loader_run.drew, changes, strict=True)]
        if not isinstance(batch, Collated):
            batch = Collated(batch, None, [], [])
        loader_run.workers_drew |= batch.drew
        if batch.file and loader_run.batches is not None and not loader_run.is_stream:
            listed = loader_run.sizes[loader_run.given : loader_run.given + 1]
            if listed and listed[0] != len(batch.checksums):  # __getitems__ gave something else
                batch = Collated(batch.batch, None, [], [])
        if not batch.file:
            batch = Collated(batch.batch, None, checksums_of_rows(batch.batch), [])
        size = len(batch.checksums) if batch.file else batch_size_of(batch.batch)
        if loader_run.batches is None:
            loader_run.sizes.append(size)
        loader_run.given += 1
        if len(loader_run.contents) < run.settings.batches:
            loader_run.contents.append(batch.checksums)
            loader_run.inputs.append(batch.inputs or batch.checksums)
        run.current_loader_run = loader_run
        if loader_run.kept is not None:
            keep_batch(run, loader_run, size, batch)
        run.note_event()
        if loader_run.with_gradients:
            run.model.keep_start()
            begin_batch(run, loader_run, loader_run.given, size)
        yield as_double(batch.batch) if run.settings.float64 else batch.batch


def begin_batch(run: RankRun, loader_run: LoaderRun, number: int, size: int) -> None:
    """Who looks ahead, as Accelerate does, computes a batch after asking for the next one: the last
    one after the end."""
    kept = -1 if loader_run.kept is None else loader_run.kept
    run.begin_batch((kept, number), [size], [])


def keep_batch(run: RankRun, loader_run: LoaderRun, size: int, batch: Collated) -> None:
    try:
        frozen = freeze(batch.batch)
    except Exception as error:  # whatever a class of the script's raises when it is pickled
        run.record.not_kept = f"a batch of {loader_run.at} cannot be pickled: {error}"[:200]
        return
    run.tensors["batches"][loader_run.kept].append(RecordedBatch(size, batch.file, frozen))


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


def watch_iterations(run: RankRun) -> None:
    @wrap(DataLoader, "__iter__")
    def iterate(original: Callable, self: Any) -> Any:
        training, loader_runs = torch.is_grad_enabled(), run.record.loader_runs
        run.end_batch()
        loader_run = begin_loader_run(self, run)
        epochs = sum(
            earlier.steps > 0 and earlier.dataset == loader_run.dataset for earlier in loader_runs
        )
        if training and epochs:
            run.in_second_epoch = True
            if not run.replaying:
                run.model.end_epoch()
                if epochs >= 2 and run.joined:
                    loader_runs.pop()  # it gives nothing any more
                    run.leave()
        object.__setattr__(self, "prove_has_begun", training)
        if run.replaying and training and (fed := run.feeder.feed(self, loader_run)) is not None:
            return fed
        object.__setattr__(self, "prove_loader_run", loader_run)
        iterator = recording_iterator(self, original, run.settings.folder)
        loader_run.base_seed = getattr(iterator, "_base_seed", None)
        if training and not run.replaying and not run.in_second_epoch:
            loader_run.kept = len(run.tensors["batches"])
            run.tensors["batches"].append([])
        return watch_fetches(run, iterator, loader_run, self)


def recording_iterator(loader: Any, iterate: Callable, folder: str) -> Iterator:
    """The loader's own iterator, whose workers write down each sample before they collate it."""
    own = loader.collate_fn
    if loader.batch_sampler is not None and not isinstance(own, RecordingCollate):
        loader.collate_fn = RecordingCollate(own, folder)
    try:
        return iterate(loader)  # it takes the function and starts the workers
    finally:
        loader.collate_fn = own


def watch_lengths(run: RankRun) -> None:
    @wrap(DataLoader, "__len__")
    def length(original: Callable, self: Any) -> int:
        object.__setattr__(self, "prove_was_asked", True)  # so it must give no more
        if not getattr(self, "prove_has_begun", False):
            run.record.asked_for_length = True  # a schedule may be made from it
        if run.replaying and (batches := run.feeder.batches_of(self)) is not None:
            return int(batches)
        return min(original(self), most_batches(run, torch.is_grad_enabled()))


def install(run: RankRun) -> None:
    watch_loaders(run)
    watch_iterations(run)
    watch_lengths(run)
