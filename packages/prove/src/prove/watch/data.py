"""Watch the DataLoaders of a rank: which samples does it draw, and in which order?

Each epoch is cut to a few batches, and the run ends after a few epochs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from prove import random_state
from prove.rank_record import EVALUATION_FACTOR, Flag, LoaderPass
from prove.watch.batches import (
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
from prove.watch.draws import Draws
from prove.watch.feeder import Feeder
from prove.watch.rank_run import RankRun, save_tensors, source_line, wrap

MAX_INDICES = 2_000_000  # further indices are not listed: a sampler may be endless
END = object()  # returned by next() when a loader has no more batches
MAX_SIZES = 64  # number of batch sizes that are recorded
MAX_MICRO_BATCHES = 32  # limit per --batches if several batches make one step


def fingerprint(dataset: Any) -> tuple[list[list[int]], list[str]]:
    """Return checksums of three samples, loaded with a fixed seed, and the names of their fields.

    They show whether all ranks hold the same data set.
    """

    def read(place: int) -> Any:
        if hasattr(dataset, "__getitems__"):
            return dataset.__getitems__([place])[0]
        return dataset[place]

    def read_three() -> list[Any]:
        with random_state.with_seed(0):
            return [read(place) for place in (0, len(dataset) // 2, len(dataset) - 1)]

    try:
        samples = read_three()
        checksums, again = (
            [*zip(*map(checksums_of_fields, three), strict=True)]
            for three in (samples, read_three())
        )
        # A field that changes when it is loaded again is drawn at random, so it is left out.
        same = [one == two for one, two in zip(checksums, again, strict=True)]
        if not same[0]:
            return [], []
        kept = [own if is_same else (0, 0, 0) for own, is_same in zip(checksums, same, strict=True)]
        names = [
            "" if isinstance(part, str) or not is_same else name
            for (name, part), is_same in zip(fields_of(samples[0]).items(), same[1:], strict=True)
        ]  # a string may be a file path, which may differ by rank
        return [[*sample] for sample in zip(*kept, strict=True)], names
    except Exception:  # the data set has no index or length, as a stream
        return [], []


def checksums_of_fields(sample: Any) -> list[int]:
    """Return checksums of a sample's first tensor and of each field, to tell which differs."""
    return [checksum(first_tensor(sample)), *map(checksum, fields_of(sample).values())]


def fields_of(sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): part for name, part in sample.items()}
    parts = sample if isinstance(sample, list | tuple) else [sample]
    return {f"field {number}": part for number, part in enumerate(parts)}


def without_subsets(dataset: Any) -> tuple[Any, Tensor | None]:
    """Return the data set below all Subsets, and the indices they choose; None means all."""
    if not isinstance(dataset, Subset):
        return dataset, None
    base, below = without_subsets(dataset.dataset)
    chosen = torch.as_tensor(list(dataset.indices), dtype=torch.long)
    return base, chosen if below is None else below[chosen]


class ListedSampler:
    """A batch sampler that lists all of its batches before it gives the first one."""

    def __init__(self, batches: Any, loader: Any, run: RankRun) -> None:
        self.batches, self.loader, self.run = batches, loader, run

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        loader_pass = last_pass(self.run, self.loader)
        if loader_pass is None or loader_pass.is_stream:
            yield from self.batches
            return
        iterator, listed, samples = iter(self.batches), [], 0
        for batch in iterator:
            listed.append(batch)
            samples += len(batch) if isinstance(batch, list | tuple) else 1
            if samples >= MAX_INDICES:
                break
        else:
            self.write(loader_pass, listed)
        yield from listed
        yield from iterator

    def write(self, loader_pass: LoaderPass, listed: list) -> None:
        batches = [batch if isinstance(batch, list | tuple) else [batch] for batch in listed]
        try:
            drawn = torch.tensor([int(i) for batch in batches for i in batch], dtype=torch.long)
        except (TypeError, ValueError):  # the sampler gives keys that are not numbers
            return
        loader_pass.batches_listed = len(batches)
        loader_pass.sizes = [len(batch) for batch in batches[:MAX_SIZES]]
        _, may_draw = without_subsets(self.loader.dataset)
        indices = drawn if may_draw is None else may_draw[drawn]
        settings, rank = self.run.settings, self.run.record.rank
        file = f"{settings.folder}/{settings.name}.{rank}.pass{loader_pass.pass_index}.pt"
        save_tensors({"indices": indices, "may_draw": may_draw}, file)
        loader_pass.samples_file = file  # set last, when the file is complete


def last_pass(run: RankRun, loader: Any) -> LoaderPass | None:
    """Return the last pass over this loader, or None before the first."""
    passes = reversed(run.record.loader_passes)
    return next((each for each in passes if each.loader_number == loader.prove_number), None)


def batches_and_samples(loader: Any) -> tuple[int, int] | None:
    """Count batches and samples of a whole pass; None if the loader has no length."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    try:
        samples = len(batches) * batches.batch_size if batches.drop_last else len(sampler)
        return len(batches), samples
    except (TypeError, NotImplementedError):  # the sampler has no length, as for a stream
        return None


class LoaderWatcher:
    """Records each pass of this rank over a loader, cuts it short, and feeds it in a replay."""

    def __init__(self, run: RankRun) -> None:
        self.run, self.model, self.steps = run, run.models, run.models.steps
        self.datasets: list[Any] = []  # kept alive, so that no other object gets the same id
        self.places: list[str] = []  # the line of each loader, by its number
        self.asked_for_length: set[int] = set()  # numbers of loaders whose length was asked for
        self.loader_passes_fed = 0  # number of passes that a replay has got so far

    def note_made(self, loader: Any) -> None:
        object.__setattr__(loader, "prove_number", len(self.places))
        self.places.append(source_line())
        for tell in self.run.events.loaders_made:
            tell(loader, self.places[-1])

    def end_batch(self) -> None:
        self.steps.end_batch()
        self.model.record_received_weights()

    def patched_iter(self, original_iter: Callable, loader: Any) -> Any:
        """Stand in for DataLoader.__iter__."""
        run, loader_passes = self.run, self.run.record.loader_passes
        training = torch.is_grad_enabled()
        self.end_batch()
        loader_pass = self.begin(loader)
        epochs = sum(
            earlier.step_count > 0 and earlier.dataset_number == loader_pass.dataset_number
            for earlier in loader_passes
        )
        if training and run.loop_watcher:
            run.loop_watcher.leave()
        if training and epochs:
            run.in_second_epoch = True
            self.steps.record_rates()
            if epochs >= run.settings.epochs and run.joined and not run.replaying:
                loader_passes.pop()  # the run ends before this pass gives a batch
                run.end_early()
        loader_pass.epoch = epochs
        if run.feeder and training:
            batches = self.batches_to_feed(run.feeder, loader, loader_pass)
            if batches is not None:
                return batches
        with run.draws.loading():
            iterator = recording_iterator(loader, original_iter, run.settings.folder)
        loader_pass.base_seed = getattr(iterator, "_base_seed", None)
        if training and not run.replaying and run.settings.keeps_batches:
            loader_pass.replay_number = len(run.tensors["batches"])
            run.tensors["batches"].append([])
        return self.own_batches(iterator, loader_pass, loader)

    def begin(self, loader: Any) -> LoaderPass:
        """Begin the record of a pass over this loader."""
        dataset, record = loader.dataset, self.run.record
        for tell in self.run.events.loaders_read:
            tell(loader)
        base, _ = without_subsets(dataset)
        is_stream = isinstance(dataset, IterableDataset)
        length = None if is_stream or not hasattr(base, "__len__") else len(base)
        dataset_number = self.number_of_dataset(loader, length)
        earlier = [
            (loader_pass.fingerprint, loader_pass.fields)
            for loader_pass in record.loader_passes
            if loader_pass.dataset_number == dataset_number
        ]
        checksums, fields = earlier[0] if earlier else fingerprint(base)
        sampler, shuffle = sampler_of(loader)
        loader_pass = LoaderPass(
            pass_index=len(record.loader_passes),
            loader_number=loader.prove_number,
            source_line=self.places[loader.prove_number],
            sampler=sampler,
            shuffle=shuffle,
            workers=loader.num_workers,
            batch_size=loader.batch_size,
            most_batches=self.run.settings.batches,
            dataset_number=dataset_number,
            dataset_length=length,
            fingerprint=checksums,
            is_stream=is_stream,
            with_gradients=torch.is_grad_enabled(),
            batches_and_samples=batches_and_samples(loader),
            steps_before=record.step_count,
            collectives_before=len(record.collectives),
            backwards_before=self.model.backwards,
            generators=random_state.state_digests(),
            fields=fields,
        )
        record.loader_passes.append(loader_pass)
        return loader_pass

    def number_of_dataset(self, loader: Any, length: int | None) -> int:
        """Number the data set of a loader.

        A data set that the script makes anew for each epoch, at the same place, keeps its number.
        """
        if torch.is_grad_enabled():
            for earlier in self.run.record.loader_passes:
                is_same_place = earlier.source_line == self.places[loader.prove_number]
                is_made_again = is_same_place and earlier.loader_number != loader.prove_number
                if is_made_again and earlier.with_gradients and earlier.dataset_length == length:
                    return earlier.dataset_number
        for dataset_number, dataset in enumerate(self.datasets):
            if dataset is loader.dataset:
                return dataset_number
        self.datasets.append(loader.dataset)
        return len(self.datasets) - 1

    def own_batches(self, iterator: Iterator, loader_pass: LoaderPass, loader: Any) -> Iterator:
        """Yield the loader's own batches, up to the limit of this pass."""
        run, model = self.run, self.model
        size, before, looks_ahead = 0, len(run.record.model_calls), False
        steps_of_others = run.record.step_count  # steps with batches of other passes
        while True:
            self.end_batch()
            # This also counts a step whose last batch came from another loader.
            if torch.is_grad_enabled():
                loader_pass.step_count = run.record.step_count - steps_of_others
            if loader_pass.step_count and not loader_pass.batches_per_step:
                loader_pass.batches_per_step = loader_pass.batches_given - looks_ahead
            loader_pass.backwards = model.backwards - loader_pass.backwards_before
            if loader_pass.batches_given == 1:
                called = len(run.record.model_calls) > before
                looks_ahead = not loader_pass.backwards and not called
            batch = None
            if not self.is_enough(loader_pass):
                batch = next_batch(iterator, loader_pass, run.draws)
            if batch is None:
                if looks_ahead and loader_pass.with_gradients:
                    self.begin_batch(loader_pass, loader_pass.batches_given + 1, size)
                if loader_pass.replay_number is not None:
                    ends = run.tensors.setdefault("states_after", {})
                    ends[loader_pass.replay_number] = random_state.all_states()
                return
            if loader_pass.with_gradients and self.made_all_steps() and self.ends_here():
                run.end_early()
            size = self.record_batch(loader_pass, batch)
            if loader_pass.with_gradients:
                model.save_start()
                for tell in run.events.batches:
                    tell(loader_pass)
                self.begin_batch(loader_pass, loader_pass.batches_given, size)
            steps_of_others = run.record.step_count - loader_pass.step_count
            yield as_double(batch.batch) if run.settings.float64 else batch.batch

    def is_enough(self, loader_pass: LoaderPass) -> bool:
        """Has the script had all batches that it gets in this pass?

        If several batches make one step, the script gets more, but never more than the length of
        its loader if it asked for it. (If this hides how the last window of an epoch ends, runs.py
        observes once more.)
        """
        given, batches = loader_pass.batches_given, self.run.settings.batches
        if self.run.replaying or not loader_pass.with_gradients:
            return given >= self.most_batches(loader_pass.with_gradients)
        if given < batches:
            return False
        if given == batches and loader_pass.loader_number not in self.asked_for_length:
            loader_pass.accumulates = (
                loader_pass.backwards > 0 and loader_pass.step_count <= batches // 2
            )
        if not loader_pass.accumulates:
            return True
        has_steps = loader_pass.step_count >= batches and loader_pass.ends_as_whole()
        return has_steps or given >= MAX_MICRO_BATCHES * batches

    def made_all_steps(self) -> bool:
        steps = self.run.settings.steps
        enough = steps is not None and self.run.record.step_count >= steps
        return enough and self.run.joined and self.given() > self.run.settings.batches_given

    def ends_here(self) -> bool:
        """Does the run end before this batch? Otherwise, an optimizer would end it in its step."""
        settings = self.run.settings
        return not settings.ends_at_step or self.run.record.step_count > (settings.steps or 0)

    def given(self) -> int:
        """Count the batches of all passes that train, with the one that is about to be given."""
        return 1 + self.run.batches_given()

    def record_batch(self, loader_pass: LoaderPass, batch: Collated) -> int:
        """Record this batch; return its number of samples."""
        run = self.run
        loader_pass.workers_drew |= batch.drew
        batch = with_checksums(batch, loader_pass)
        size = len(batch.checksums) if batch.file else batch_size_of(batch.batch)
        if loader_pass.batches_listed is None:
            loader_pass.sizes.append(size)
        loader_pass.batches_given += 1
        if len(loader_pass.contents) < self.most_batches(loader_pass.with_gradients):
            loader_pass.contents.append(batch.checksums)
            loader_pass.labels += batch.labels or []
        run.current_loader_pass = loader_pass
        if loader_pass.replay_number is not None:
            self.save_batch(loader_pass, size, batch)
        run.note_event()
        return size

    def save_batch(self, loader_pass: LoaderPass, size: int, batch: Collated) -> None:
        try:
            frozen = freeze(batch.batch)
        except Exception as error:  # a class of the script may raise anything when pickled
            text = f"a batch of {loader_pass.source_line} cannot be pickled: {error}"
            self.run.record.why_not_kept = text[:200]
            return
        kept = RecordedBatch(size, batch.file, frozen)
        self.run.tensors["batches"][loader_pass.replay_number].append(kept)

    def begin_batch(self, loader_pass: LoaderPass, batch_number: int, size: int) -> None:
        """Tell the watchers of steps and draws that this batch is computed now.

        A script that looks ahead, as Accelerate does, computes a batch after it has asked for the
        next one, and the last batch after the loader has ended.
        """
        kept = -1 if loader_pass.replay_number is None else loader_pass.replay_number
        self.steps.begin_batch((kept, batch_number), [size], [])

    def most_batches(self, training: bool) -> int:
        settings = self.run.settings
        # In a replay, one rank evaluates the samples of all ranks.
        ranks = settings.world_size if self.run.replaying else 1
        return settings.batches * ranks * (1 if training else EVALUATION_FACTOR)

    def patched_len(self, original_len: Callable, loader: Any) -> int:
        """Stand in for DataLoader.__len__."""
        self.asked_for_length.add(loader.prove_number)  # is_enough() keeps to this length
        last = last_pass(self.run, loader)
        if last is None or not last.with_gradients:
            self.run.flag(Flag.ASKED_FOR_LENGTH)  # perhaps to make a schedule of this length
        if self.run.feeder and (batches := self.run.feeder.batches_of(loader)) is not None:
            return batches
        return min(original_len(loader), self.most_batches(torch.is_grad_enabled()))

    def batches_to_feed(
        self, feeder: Feeder, loader: Any, loader_pass: LoaderPass
    ) -> Iterator | None:
        """Return the recorded batches of the next pass, or None if there was no such pass."""
        while not feeder.is_made_here(self.loader_passes_fed):
            self.loader_passes_fed += 1
        record, pass_index = self.run.record, self.loader_passes_fed
        self.loader_passes_fed += 1
        if pass_index < feeder.passes:
            record.own_batch_size = record.own_batch_size or loader.batch_size
            return self.recorded_batches(feeder, pass_index, loader_pass, loader.collate_fn)
        if record.step_count:
            self.run.end_early()
        return None

    def recorded_batches(
        self, feeder: Feeder, pass_index: int, loader_pass: LoaderPass, collate: Callable | None
    ) -> Iterator:
        run, steps = self.run, self.steps
        positions, sources = feeder.positions(pass_index), []
        before, looks_ahead = self.calls_so_far(), False
        for position in range(positions):
            for ranks in feeder.groups(pass_index):
                self.end_batch()
                if loader_pass.batches_given == 1:
                    looks_ahead = self.calls_so_far() == before
                batch, sources = feeder.batch(pass_index, position, ranks, collate)
                loader_pass.batches_given += 1
                loader_pass.sizes.append(sum(feeder.sizes))
                run.current_loader_pass = loader_pass
                self.model.save_start()
                steps.begin_batch((pass_index, position + 1), feeder.sizes, sources)
                yield batch
        self.end_batch()
        if loader_pass.epoch == run.settings.epochs - 1:
            run.end_early()
        feeder.restore_generators(pass_index)
        if looks_ahead:  # the script computes the last batch now: see begin_batch
            steps.begin_batch((pass_index, positions + 1), feeder.sizes, sources)
        if pass_index > 0:  # an evaluation with gradients may end with unequal batches
            run.in_second_epoch = True  # numbers printed later are not compared

    def calls_so_far(self) -> tuple[int, int]:
        """Count the calls of backward and of models that this rank has made."""
        return self.model.backwards, len(self.run.record.model_calls)


def sampler_of(loader: Any) -> tuple[str, bool | None]:
    """Return the class of a loader's sampler, and whether it shuffles; None if unknown."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    shuffle = getattr(sampler, "shuffle", None)
    return type(sampler).__name__, None if shuffle is None else bool(shuffle)


def next_batch(iterator: Iterator, loader_pass: LoaderPass, draws: Draws) -> Collated | None:
    """Take the next batch, or None at the end; note which generators have drawn for it."""
    before = random_state.state_digests()
    with draws.loading():
        batch = next(iterator, END)
    loader_pass.ended = batch is END
    if loader_pass.ended:
        return None
    after = random_state.state_digests()
    if loader_pass.batches_given:  # before the first batch, the sampler also draws its seed
        changes = [old != new for old, new in zip(before, after, strict=True)]
        loader_pass.drew = [a or b for a, b in zip(loader_pass.drew, changes, strict=True)]
    return batch if isinstance(batch, Collated) else Collated(batch, None, [])


def with_checksums(batch: Collated, loader_pass: LoaderPass) -> Collated:
    """Use checksums of the rows if the samples of a batch are unknown or not the sampler's."""
    is_known = bool(batch.file)
    if is_known and loader_pass.batches_listed is not None and not loader_pass.is_stream:
        listed = loader_pass.sizes[loader_pass.batches_given : loader_pass.batches_given + 1]
        if listed and listed[0] != len(batch.checksums):  # __getitems__ gave other samples
            is_known = False
    return batch if is_known else Collated(batch.batch, None, checksums_of_rows(batch.batch))


def recording_iterator(loader: Any, iterate: Callable, folder: str) -> Iterator:
    """Make the loader's own iterator, whose workers write down each sample before they collate."""
    own = loader.collate_fn
    if loader.batch_sampler is not None and not isinstance(own, RecordingCollate):
        loader.collate_fn = RecordingCollate(own, folder)
    try:
        return iterate(loader)  # the iterator keeps collate_fn and starts the workers
    finally:
        loader.collate_fn = own


def watch_new_loaders(run: RankRun, watcher: LoaderWatcher) -> None:
    """Number the loaders, and list what their samplers draw."""
    index_sampler: Any = DataLoader._index_sampler

    @wrap(DataLoader, "__init__")
    def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        watcher.note_made(self)

    DataLoader._index_sampler = property(  # type: ignore[assignment]
        lambda self: ListedSampler(index_sampler.fget(self), self, run)
    )


def install(run: RankRun) -> None:
    watcher = LoaderWatcher(run)
    watch_new_loaders(run, watcher)
    wrap(DataLoader, "__iter__")(watcher.patched_iter)
    wrap(DataLoader, "__len__")(watcher.patched_len)
