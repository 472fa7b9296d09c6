"""Watches the loaders: which samples a rank draws, and in which order. It cuts each epoch short."""

import random
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, dataloader

from prove import record
from prove.record import Run, digests_of_generators, where

MOST_INDICES = 2_000_000  # more are not listed: a sampler may have no end
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


def batch_size_of(batch: Any) -> int:
    found = [x for x in tensors_in(batch) if x.ndim]
    if isinstance(batch, list | tuple) and not any(isinstance(x, Tensor) for x in batch):
        return len(batch)  # collate_fn=list
    return len(found[0]) if found else 1


def checksums(batch: Any) -> list[int]:
    """A number for the content of each sample."""
    rows = batch_size_of(batch)
    if isinstance(batch, list | tuple) and not any(isinstance(x, Tensor) for x in batch):
        return [checksum(tensors_in(sample)[0]) for sample in batch if tensors_in(sample)]
    columns = [x for x in tensors_in(batch) if has_rows(x, rows)]
    wide = [x for x in columns if x[0].numel() > 1] or columns
    return [checksum(row) for row in wide[0]] if wide else []


def fingerprint(dataset: Dataset) -> list:
    """Three samples, loaded with fixed seeds: do the ranks hold the same data set?"""
    if isinstance(dataset, IterableDataset):
        return []
    numpy = sys.modules.get("numpy")
    kept = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    found = []
    try:
        size = len(dataset)  # type: ignore[arg-type]
        for i in (0, size // 2, size - 1):
            torch.manual_seed(0)
            random.seed(0)
            if numpy:
                numpy.random.seed(0)
            found.append([checksum(x) for x in tensors_in(dataset[i])[:2]])
    except Exception:  # whatever the user's data set raises for our question, is no answer
        found = []
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    if numpy:
        numpy.random.set_state(kept[2])
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
        if total < MOST_INDICES:
            self.write(now, listed)
        yield from listed
        yield from iterator

    def write(self, now: dict, listed: list) -> None:
        try:
            rows = [batch if isinstance(batch, list | tuple) else [batch] for batch in listed]
            drawn = torch.tensor([int(i) for row in rows for i in row], dtype=torch.long)
        except (TypeError, ValueError):  # a sampler of keys that are no numbers
            return
        _, held = unwrapped(self.loader.dataset)
        now["batches"], now["sizes"] = len(rows), [len(row) for row in rows[:64]]
        now["drawn"] = len(drawn)
        now["sorted"] = bool((drawn[1:] >= drawn[:-1]).all())
        now["last_size"] = len(rows[-1]) if rows else 0
        now["file"] = str(self.run.keep_file(f"pass{now['number']}"))
        indices = drawn if held is None else held[drawn]
        record.save_tensors({"indices": indices, "held": held}, now["file"])


def begin_pass(loader: Any, run: Run) -> dict:
    base, _ = unwrapped(loader.dataset)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    passes = run.facts["passes"]
    earlier = [p for p in passes if p["dataset"] == id(loader.dataset)]
    iterable = isinstance(loader.dataset, IterableDataset)
    now = {
        "number": len(passes), "loader": loader.prove_number, "at": loader.prove_at,
        "dataset": id(loader.dataset), "class": type(loader).__name__, "iterable": iterable,
        "sampler": type(sampler).__name__, "shuffle": getattr(sampler, "shuffle", None),
        "workers": loader.num_workers, "batch_size": loader.batch_size,
        "base_length": None if iterable or not hasattr(base, "__len__") else len(base),
        "held": None if iterable or not hasattr(loader.dataset, "__len__") else len(loader.dataset),
        "fingerprint": earlier[0]["fingerprint"] if earlier else fingerprint(base),
        "training": torch.is_grad_enabled(), "given": 0, "steps": 0, "ended": False,
        "limit": run.limit, "steps_before": run.steps,
        "collectives_before": len(run.facts["collectives"]),
        "samples": [], "sizes": [], "batches": None, "drawn": None, "file": None,
        "generators": digests_of_generators(), "drew": [False] * 3, "base_seed": None,
    }  # fmt: skip
    passes.append(now)
    return now


def install(run: Run) -> None:
    make, iterate, length = DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__
    index_sampler, fetch = DataLoader._index_sampler, dataloader._BaseDataLoaderIter.__next__
    run.tensors["batches"] = []  # of each training pass of the first epoch

    def most_batches(training: bool) -> int:
        ranks = run.ranks if run.replaying else 1  # one rank evaluates what all ranks did
        return run.limit * ranks * (1 if training else EVALUATION)

    def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        object.__setattr__(self, "prove_number", run.counts["loaders"])
        object.__setattr__(self, "prove_at", where())
        run.counts["loaders"] += 1

    def new_iter(self: Any) -> Any:
        training = torch.is_grad_enabled()
        trained = [
            p for p in run.facts["passes"] if p["dataset"] == id(self.dataset) and p["steps"]
        ]
        if training and trained:
            run.counts["second epoch"] = 1
            if not run.replaying:
                run.epoch_ended()
                if len(trained) >= 2 and run.joined:
                    record.leave("epochs")
        now = begin_pass(self, run)
        if run.replaying and training and (fed := run.feed(self, now)) is not None:
            return fed
        object.__setattr__(self, "prove_pass", now)
        iterator = iterate(self)
        iterator.prove_pass = now  # type: ignore[attr-defined]
        now["base_seed"] = getattr(iterator, "_base_seed", None)
        if training and not run.replaying and not run.counts["second epoch"]:
            now["kept"] = len(run.tensors["batches"])
            run.tensors["batches"].append([])
        return iterator

    def new_next(self: Any) -> Any:
        now = getattr(self, "prove_pass", None)
        if now is None:
            return fetch(self)
        if now["given"] >= most_batches(now["training"]):
            raise StopIteration
        before = digests_of_generators()
        try:
            batch = fetch(self)
        except StopIteration:
            now["ended"] = True
            raise
        run.after_fetch, run.current_pass = digests_of_generators(), now
        if now["given"]:  # not at the first batch, where a sampler draws its seed
            drew = [a != b for a, b in zip(before, run.after_fetch, strict=True)]
            now["drew"] = [a or b for a, b in zip(now["drew"], drew, strict=True)]
        size = batch_size_of(batch)
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
            run.start()
        return as_double(batch) if run.double else batch

    def new_len(self: Any) -> int:
        if run.replaying and (known := run.length_of(self)) is not None:
            return known
        return min(length(self), most_batches(torch.is_grad_enabled()))

    DataLoader.__init__, DataLoader.__iter__ = new_init, new_iter  # type: ignore[method-assign]
    DataLoader.__len__ = new_len  # type: ignore[method-assign]
    DataLoader._index_sampler = property(  # type: ignore[assignment]
        lambda self: ListedSampler(index_sampler.fget(self), self, run)  # type: ignore[attr-defined]
    )
    dataloader._BaseDataLoaderIter.__next__ = new_next  # type: ignore[method-assign]
