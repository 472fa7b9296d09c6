"""Watches the loaders: which samples a rank draws, and in which order. It cuts each epoch short."""

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from prove.record import Run, digests_of_generators, save_tensors, where, wrap

MOST_INDICES = 2_000_000  # more are not listed: a sampler may have no end
MOST_SIZES = 64  # of batches
EVALUATION = 4  # an evaluation gets so many times the batches of a training epoch


def tensors_in(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [y for part in x for y in tensors_in(part)] if isinstance(x, list | tuple) else []


def mapped(function: Any, x: Any) -> Any:
    """The same lists, tuples and dicts, with a function applied to each tensor."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        new = {key: mapped(function, value) for key, value in x.items()}
        try:
            return type(x)(new)
        except TypeError:
            return new
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(mapped(function, value) for value in x))
    return type(x)(mapped(function, y) for y in x) if type(x) in (list, tuple) else x


def as_double(x: Any) -> Any:
    return mapped(lambda t: t.double() if t.is_floating_point() else t, x)


def copied(x: Any) -> Any:
    return mapped(lambda t: t.detach().cpu().clone(), x)


def checksum(x: Tensor) -> int:
    values = x.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0


def has_rows(x: Any, rows: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and len(x) == rows


def is_list_of_samples(batch: Any) -> bool:
    """As collate_fn=list makes it."""
    return isinstance(batch, list | tuple) and not any(isinstance(x, Tensor) for x in batch)


def batch_size_of(batch: Any) -> int:
    if is_list_of_samples(batch):
        return len(batch)
    return next((len(x) for x in tensors_in(batch) if x.ndim), 1)


def checksums(batch: Any) -> list[int]:
    """A number for the content of each sample."""
    if is_list_of_samples(batch):
        return [checksum(tensors_in(sample)[0]) for sample in batch if tensors_in(sample)]
    columns = [x for x in tensors_in(batch) if has_rows(x, batch_size_of(batch))]
    wide = [x for x in columns if x[0].numel() > 1] or columns
    return [checksum(row) for row in wide[0]] if wide else []


def fingerprint(dataset: Any) -> list:
    """Three samples, loaded with fixed seeds: do the ranks hold the same data set?"""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    read = getattr(dataset, "__getitems__", None) or (lambda chosen: dataset[chosen[0]])
    found = []
    try:
        for i in (0, len(dataset) // 2, len(dataset) - 1):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs as well
            random.seed(0)
            if numpy:
                numpy.random.seed(0)
            found.append([checksum(x) for x in tensors_in(read([i]))[:2]])
    except Exception:  # a data set that cannot answer, a stream for example
        found = []
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if numpy:
        numpy.random.set_state(states[2])
    return found


def unwrapped(dataset: Any) -> tuple[Any, Tensor | None]:
    """The data set below all Subsets, and which of its samples these hold (None: all)."""
    if type(dataset) is not Subset:
        return dataset, None
    base, below = unwrapped(dataset.dataset)
    chosen = torch.as_tensor(list(dataset.indices), dtype=torch.long)
    return base, chosen if below is None else below[chosen]


class ListedSampler:
    """A batch sampler that is listed to its end before it gives its first batch."""

    def __init__(self, batches: Any, loader: Any, run: Run) -> None:
        self.batches, self.loader, self.run = batches, loader, run

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        now = getattr(self.loader, "prove_pass", None)
        if now is None or now["iterable"]:
            yield from self.batches
            return
        iterator, listed, total = iter(self.batches), [], 0
        for batch in iterator:
            listed.append(batch)
            total += len(batch) if isinstance(batch, list | tuple) else 1
            if total >= MOST_INDICES:
                break
        else:
            self.write(now, listed)
        yield from listed
        yield from iterator

    def write(self, now: dict, listed: list) -> None:
        rows = [batch if isinstance(batch, list | tuple) else [batch] for batch in listed]
        try:
            drawn = torch.tensor([int(i) for row in rows for i in row], dtype=torch.long)
        except (TypeError, ValueError):  # a sampler of keys that are no numbers
            return
        _, held = unwrapped(self.loader.dataset)
        sizes = [len(row) for row in rows]
        now |= {"batches": len(rows), "sizes": sizes[:MOST_SIZES], "last": (sizes or [0])[-1]}
        file = str(self.run.keep_file(f"pass{now['number']}"))
        save_tensors({"indices": drawn if held is None else held[drawn], "held": held}, file)
        now["file"] = file  # now that it is whole


def whole_epoch(loader: Any) -> list[int] | None:
    """How many batches and samples a pass over a loader has; None: it does not say."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    try:
        whole = len(batches) * batches.batch_size
        return [len(batches), whole if batches.drop_last else len(sampler)]
    except (TypeError, NotImplementedError):  # a sampler without a length, as for a stream
        return None


def begin_pass(loader: Any, run: Run) -> dict:
    """What is written down about one pass over a loader."""
    base, _ = unwrapped(loader.dataset)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    passes = run.facts["passes"]
    earlier = [p["fingerprint"] for p in passes if p["dataset"] == id(loader.dataset)]
    iterable = isinstance(loader.dataset, IterableDataset)
    now = {
        "number": len(passes), "loader": loader.prove_number, "at": loader.prove_at,
        "dataset": id(loader.dataset), "class": type(loader).__name__, "iterable": iterable,
        "sampler": type(sampler).__name__, "shuffle": getattr(sampler, "shuffle", None),
        "workers": loader.num_workers, "batch_size": loader.batch_size,
        "base_length": None if iterable or not hasattr(base, "__len__") else len(base),
        "fingerprint": earlier[0] if earlier else fingerprint(base),
        "training": torch.is_grad_enabled(), "given": 0, "steps": 0, "ended": False,
        "limit": run.limit, "steps_before": run.steps,
        "collectives_before": len(run.facts["collectives"]), "epoch": whole_epoch(loader),
        "backwards": 0, "backwards_before": run.counts["backwards"],
        "samples": [], "sizes": [], "batches": None, "last": 0, "file": None,
        "generators": digests_of_generators(), "drew": [False] * 3, "base_seed": None,
    }  # fmt: skip
    passes.append(now)
    return now


def watch_fetches(run: Run, iterator: Iterator, now: dict, most: int) -> Iterator:
    """The batches of one pass, until there are enough."""
    size = 0
    while True:
        now["backwards"] = run.counts["backwards"] - now["backwards_before"]
        if now["given"] >= most:
            return
        before = digests_of_generators()
        try:
            batch = next(iterator)
        except StopIteration:
            now["ended"] = True
            return
        run.current_pass, run.after_fetch = now, digests_of_generators()
        if now["given"]:  # not at the first batch, where a sampler draws its seed
            drew = [a != b for a, b in zip(before, run.after_fetch, strict=True)]
            now["drew"] = [a or b for a, b in zip(now["drew"], drew, strict=True)]
        whole = now["batch_size"] or 1
        last_but_one, size = size, batch_size_of(batch)
        if last_but_one % whole or (size > whole and size % whole):  # only the last may be smaller
            run.facts["samples_elsewhere"] = True
        if now["batches"] is None:
            now["sizes"].append(size)
        now["given"] += 1
        run.counts["fetched"] += 1
        run.events += 1
        if len(now["samples"]) < run.limit:
            now["samples"].append(checksums(batch))
        if "kept" in now:
            run.tensors["batches"][now["kept"]].append((size, copied(batch)))
        if now["training"]:
            run.model.start()
        yield as_double(batch) if run.double else batch


def install(run: Run) -> None:
    index_sampler: Any = DataLoader._index_sampler

    def most_batches(training: bool) -> int:
        ranks = run.ranks if run.replaying else 1  # one rank evaluates what all ranks did
        return run.limit * ranks * (1 if training else EVALUATION)

    @wrap(DataLoader, "__init__")
    def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        object.__setattr__(self, "prove_number", run.counts["loaders"])
        object.__setattr__(self, "prove_at", where())
        run.counts["loaders"] += 1

    @wrap(DataLoader, "__iter__")
    def iterate(original: Callable, self: Any) -> Any:
        training, passes = torch.is_grad_enabled(), run.facts["passes"]
        trained = sum(p["dataset"] == id(self.dataset) and p["steps"] > 0 for p in passes)
        if training and trained:
            run.counts["second epoch"] = 1
            if not run.replaying:
                run.model.epoch_ended()
                if trained >= 2 and run.joined:
                    run.leave("epochs")
        now = begin_pass(self, run)
        if run.replaying and training and (fed := run.feeder.batches(self, now)) is not None:
            return fed
        object.__setattr__(self, "prove_pass", now)
        iterator = original(self)
        now["base_seed"] = getattr(iterator, "_base_seed", None)
        if training and not run.replaying and not run.counts["second epoch"]:
            now["kept"] = len(run.tensors["batches"])
            run.tensors["batches"].append([])
        return watch_fetches(run, iterator, now, most_batches(training))

    @wrap(DataLoader, "__len__")
    def length(original: Callable, self: Any) -> int:
        if run.replaying and (known := run.feeder.length_of(self)) is not None:
            return int(known)
        return min(original(self), most_batches(torch.is_grad_enabled()))

    DataLoader._index_sampler = property(  # type: ignore[assignment]
        lambda self: ListedSampler(index_sampler.fget(self), self, run)
    )
