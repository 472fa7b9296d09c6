"""Store the batches of each rank, and merge those of all ranks into one.

The script itself knows best: it made its batch from samples. So the samples are kept, and one rank
gets what the script's own `collate_fn` makes of the samples of all ranks. Pickle walks through a
sample or batch, whatever its classes are: dataclasses, mappings of a library, nested lists.
"""

import io
import itertools
import os
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prove import random_state
from prove.comparable import NotComparableError, comparable, widened

sample_files = itertools.count()


class CannotMergeError(Exception):
    """Batches of several ranks cannot become one; the text says which part of them."""


class Frozen(NamedTuple):
    """A sample or batch as its pickle, in which numbers stand for the tensors."""

    pickled: bytes
    tensors: list[Tensor]


class Freezer(pickle.Pickler):
    """Pickles a value but collects its tensors in a list, and writes their numbers instead."""

    def __init__(self, stream: io.BytesIO, without_memo: bool) -> None:
        super().__init__(stream, protocol=5)
        self.fast = without_memo
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor:
            return None
        if id(value) not in self.numbers or self.fast:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self.numbers[id(value)]


class Thawer(pickle.Unpickler):
    """Rebuilds a frozen value, with `tensors` in the place of its own."""

    def __init__(self, frozen: Frozen, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(frozen.pickled))
        self.tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        return self.tensors[number]


def own_copy(tensor: Tensor) -> Tensor:
    """Copy only the values of a tensor: pickle would write the whole storage of a view."""
    if tensor.is_meta:
        return tensor  # there are no values to copy
    return tensor.detach().cpu().clone()


def freeze(
    value: Any, change: Callable[[Tensor], Tensor] = own_copy, without_memo: bool = False
) -> Frozen:
    """Take a value apart into its pickle and its tensors.

    without_memo: equal values give equal bytes; such a value must not contain itself.
    """
    stream = io.BytesIO()
    freezer = Freezer(stream, without_memo)
    freezer.dump(value)
    return Frozen(stream.getvalue(), [change(tensor) for tensor in freezer.tensors])


def thaw(frozen: Frozen) -> Any:
    return Thawer(frozen, [tensor.clone() for tensor in frozen.tensors]).load()


def tensors_in(nested: Any) -> list[Tensor]:
    """List all tensors of a batch, however its parts are nested."""
    if isinstance(nested, Tensor):
        return [nested]
    if nested is None or isinstance(nested, str | bytes | int | float):
        return []
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, list | tuple):
        return [tensor for part in nested for tensor in tensors_in(part)]
    try:
        return freeze(nested, lambda tensor: tensor).tensors
    except Exception:  # whatever a class of the script's raises when it is pickled
        return []


def map_tensors(change: Callable[[Tensor], Tensor], nested: Any) -> Any:
    """Return a value of the same form, with `change` applied to each tensor in it."""
    if isinstance(nested, Tensor):
        return change(nested)
    if type(nested) in (list, tuple):
        return type(nested)(map_tensors(change, part) for part in nested)
    if type(nested) is dict:
        return {key: map_tensors(change, part) for key, part in nested.items()}
    if nested is None or isinstance(nested, str | bytes | int | float):
        return nested
    try:
        frozen = freeze(nested, lambda tensor: tensor)
    except Exception:  # whatever a class of the script's raises when it is pickled
        return nested
    changed = [change(tensor) for tensor in frozen.tensors]
    pairs = zip(frozen.tensors, changed, strict=True)
    if all(old is new for old, new in pairs):
        return nested
    return Thawer(frozen, changed).load()


def as_double(nested: Any) -> Any:
    return map_tensors(widened, nested)


def copy_tensors(nested: Any) -> Any:
    return map_tensors(own_copy, nested)


def are_same(value: Any, other: Any) -> bool:
    try:
        one, two = freeze(value, without_memo=True), freeze(other, without_memo=True)
    except Exception:  # whatever a class of the script's raises when it is pickled
        return False
    if one.pickled != two.pickled or len(one.tensors) != len(two.tensors):
        return False
    return all(map(are_equal, one.tensors, two.tensors))


def are_equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    try:
        return torch.equal(comparable(tensor).nan_to_num(), comparable(other).nan_to_num())
    except NotComparableError:
        return False


def checksum(value: Any) -> int:
    """Turn the content of a sample into one number: tensors, numbers, strings, arrays."""
    if not isinstance(value, Tensor):
        try:
            frozen = freeze(value, lambda tensor: tensor, without_memo=True)
        except Exception:  # whatever a class of the script's raises when it is pickled
            return 0
        result = zlib.crc32(frozen.pickled)
        for tensor in frozen.tensors:
            result = zlib.crc32(checksum(tensor).to_bytes(4, "big"), result)
        return result
    try:
        is_usual = value.layout is torch.strided and not (
            value.is_quantized or value.is_nested or value.is_complex() or value.is_neg()
        )
        values = value.detach().cpu().contiguous().reshape(-1) if is_usual else comparable(value)
        return zlib.crc32(random_state.bytes_of(values)) if values.numel() else 0
    except (RuntimeError, NotComparableError):  # torch.func tensors may have no memory
        return 0


class Collated(NamedTuple):
    """A batch on its way from the worker that made it.

    It is a NamedTuple because a thread that pins memory pins the parts of one.
    """

    batch: Any
    file: str | None  # path of the file with its samples
    checksums: list[int]  # one for each sample
    drew: bool = True  # a worker has drawn random numbers, or may have
    labels: list[int] | None = None  # for each sample, a checksum of all but its first tensor


class RecordingCollate:
    """Wraps the script's collate_fn, in the rank or in a worker, and stores the samples.

    The samples are stored first, because collate_fn may change them.
    """

    def __init__(self, collate: Callable, folder: str) -> None:
        self.collate, self.folder = collate, folder

    def __call__(self, data: Any) -> Collated:
        if type(data) is not list:  # a data set with __getitems__ may give anything
            return Collated(self.collate(data), None, [])
        try:
            frozen = freeze(list(data))
            file = f"{self.folder}/samples.{os.getpid()}.{next(sample_files)}"
            Path(file).write_bytes(pickle.dumps(tuple(frozen)))
        except Exception:  # whatever a sample raises when it is pickled
            file = None
        checksums = [checksum(sample) for sample in data]
        labels = [checksum(parts) if (parts := labels_of(sample)) else 0 for sample in data]
        batch = self.collate(data)
        return Collated(batch, file, checksums, random_state.worker_drew(), labels)


def first_tensor(sample: Any) -> Any:
    """Find the likely model input in a sample: its first tensor with more than one number."""
    tensors = tensors_in(sample)
    return next((tensor for tensor in tensors if tensor.numel() > 1), (tensors or [sample])[0])


def labels_of(sample: Any) -> list:
    """List the parts of a sample beside its first tensor, which augmentation leaves alone."""
    parts = [*sample.values()] if isinstance(sample, dict) else sample
    first = first_tensor(sample)
    if not isinstance(parts, list | tuple):
        return []
    return [part for part in parts if not any(own is first for own in [part, *tensors_in(part)])]


def order_of_rows(sizes: list[int]) -> list[tuple[int, int]]:
    """List (rank, sample) for each row of a merged batch: sample 0 of each rank, then sample 1."""
    pairs = [(rank, sample) for rank, size in enumerate(sizes) for sample in range(size)]
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def interleave(parts: list[Tensor], sizes: list[int], dim: int = 0, blocks: int = 1) -> Tensor:
    """Put the rows of all ranks into one tensor.

    A sample may have several adjacent rows, or one row in each block, as in
    torch.cat([crops, other_crops]).
    """
    if blocks > 1:
        parts_of_blocks = zip(*(part.chunk(blocks, dim) for part in parts), strict=True)
        return torch.cat([interleave([*each], sizes, dim) for each in parts_of_blocks], dim)
    lengths = [part.shape[dim] for part in parts]
    per_sample = {length / size for length, size in zip(lengths, sizes, strict=True)}
    if len(per_sample) > 1 or not (rows := per_sample.pop()).is_integer():
        raise CannotMergeError("another number of rows for each sample")
    starts = [0, *itertools.accumulate(sizes)]
    chosen = [
        (starts[rank] + sample) * int(rows) + row
        for rank, sample in order_of_rows(sizes)
        for row in range(int(rows))
    ]
    joined = torch.cat(parts, dim)
    return joined.index_select(dim, torch.tensor(chosen, device=joined.device))


def merge_batches(parts: list, sizes: list[int]) -> Any:
    """Merge the batches of all ranks into one batch, tensor by tensor.

    Raises CannotMergeError if a part has no row for each sample and differs between the ranks.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(isinstance(part, Tensor) for part in parts) and all(map(has_rows, parts, sizes)):
        return interleave(parts, sizes)
    if isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
        plain = {key: merge_batches([part[key] for part in parts], sizes) for key in first}
        return plain if type(first) is dict else of_class(first, plain)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(
            *(merge_batches(list(column), sizes) for column in zip(*parts, strict=True))
        )
    if type(first) in (list, tuple):
        has_samples = not any(isinstance(part, Tensor) and part.ndim for part in first)
        if has_samples and [*map(len, parts)] == sizes:
            return type(first)(parts[rank][sample] for rank, sample in order_of_rows(sizes))
        if len({len(part) for part in parts}) == 1:
            columns = zip(*parts, strict=True)
            return type(first)(merge_batches(list(column), sizes) for column in columns)
    if all(are_same(first, part) for part in parts[1:]):
        return first
    raise CannotMergeError(f"a {type(first).__name__} that has no row for each sample")


def of_class(example: Any, plain: dict) -> Any:
    """Make a mapping of the class of the example, such as transformers' BatchEncoding."""
    try:
        return type(example)(plain)
    except TypeError:
        raise CannotMergeError(f"a {type(example).__name__}") from None


def has_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == rows


class RecordedBatch(NamedTuple):
    """One batch as one rank computed with it, and the file with its samples."""

    size: int  # number of samples
    file: str | None  # path of the file with these samples
    batch: Frozen

    def samples(self) -> list:
        assert self.file is not None
        return thaw(Frozen(*pickle.loads(Path(self.file).read_bytes())))


def merge_by_collate(collate: Callable | None, batches: list[RecordedBatch]) -> Any:
    """Let the script's own collate_fn make one batch of the samples of all ranks.

    collate_fn is trusted only if it makes the same batches of the same samples once more.
    """
    sizes = [recorded.size for recorded in batches]
    own = [thaw(recorded.batch) for recorded in batches]
    if len(batches) == 1:
        return own[0]
    why = "the script has no list of samples"
    if collate is not None and all(recorded.file for recorded in batches):
        again = [collate(recorded.samples()) for recorded in batches]
        if all(map(are_same, again, own)):
            lists = [recorded.samples() for recorded in batches]
            return collate([lists[rank][sample] for rank, sample in order_of_rows(sizes)])
        why = "collate_fn makes another batch of the same samples the second time"
    try:
        return merge_batches(own, sizes)
    except CannotMergeError as error:
        raise CannotMergeError(f"{error}, and {why}") from None


def owners_of_rows(rows: int, sizes: list[int], in_blocks: bool) -> list[Tensor] | None:
    """Find which rows of an activation of the merged batch came from which rank, or None.

    A sample may have several rows: adjacent ones, or with in_blocks one in each block, as in
    torch.cat([real, made]). The script may also cut the batch into equal parts.
    """
    samples, ranks = sum(sizes), len(sizes)
    if rows % samples:
        is_part = samples % rows == 0 and rows % ranks == 0 and len(set(sizes)) == 1
        return [torch.arange(rank, rows, ranks) for rank in range(ranks)] if is_part else None
    owner = torch.tensor([rank for rank, _ in order_of_rows(sizes)])
    per_sample = rows // samples
    owner = owner.repeat(per_sample) if in_blocks else owner.repeat_interleave(per_sample)
    return [torch.where(owner == rank)[0] for rank in range(ranks)]


def batch_size_of(batch: Any) -> int:
    """Guess how many samples a batch has, from the batch alone."""
    if isinstance(batch, list | tuple) and not any(isinstance(part, Tensor) for part in batch):
        return len(batch)  # a list of samples, made by collate_fn=list
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 1)


def checksums_of_rows(batch: Any) -> list[int]:
    """Turn each row of a batch into one number, for batches whose samples are unknown."""
    size = batch_size_of(batch)
    columns = [tensor for tensor in tensors_in(batch) if has_rows(tensor, size)]
    wide = [column for column in columns if column[0].numel() > 1] or columns
    return [checksum(row) for row in wide[0]] if wide else []
