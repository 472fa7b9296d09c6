"""Writes checkpoints that survive a kill, a full disk or damage, and resumes inside an epoch.

python beyond/survive/durable.py
"""

import hashlib
import os
import random
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils.data import Dataset, Sampler

MARK = b"\nsha256 "  # before the checksum, at the end of a file; torch.load ignores both
SEAL_BYTES = len(MARK) + 64  # the mark and the checksum
CHUNK_BYTES = 2**20  # memory holds so much of a file at a time
SAVED_HERE: set[Path] = set()  # the checkpoints that this process has written


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. The text says what to do."""


def previous_path(path: Path) -> Path:
    """Return where the checkpoint before this one is kept."""
    return path.with_name(f"{path.stem}.before{path.suffix}")


class HashingFile:
    """A new file that can only be written from front to back, and is hashed on the way.

    It never raises, because torch.save calls it from C++: the error waits in `error`.
    """

    def __init__(self, path: Path) -> None:
        self.file, self.sha256 = path.open("wb"), hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            if not self.error:
                self.file.write(data)
        except OSError as error:
            self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass  # torch.save asks for it; `seal` does more

    def seal(self) -> None:
        """Add the checksum, and wait until all of it is on the disk."""
        self.write(MARK + self.sha256.hexdigest().encode())
        if self.error:
            raise self.error
        self.file.flush()
        os.fsync(self.file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """torch.save in the block, to the file that this yields. A kill at any time leaves a whole one.

    Before the block, the checkpoint that is there becomes the previous one. After it, a checksum is
    added, the file is forced to disk and gets its name. CheckpointError if the block cannot write.
    """
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")  # another run must not write to it
    try:
        # A damaged one must not replace the good one before it. What this process has saved itself
        # is not read again.
        if (path in SAVED_HERE and path.exists()) or is_whole(path):
            path.replace(previous_path(path))
        file = HashingFile(unfinished)
        with file.file:
            yield file
            file.seal()
        unfinished.replace(path)  # not earlier: a power cut could leave zeros
        SAVED_HERE.add(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save's
        with suppress(OSError):  # the folder itself may be what cannot be written
            unfinished.unlink(missing_ok=True)  # but not path: what is there is not of this save
        why, todo = "there is no whole one before", "make room, then start again"
        if is_whole(path) or is_whole(previous_path(path)):
            why, todo = "the one before is whole", "make room, then --resume auto"
        raise CheckpointError(f"cannot write {path} ({error}), {why}: {todo}") from error


def is_whole(path: Path) -> bool:
    """Tell whether the file is there and its checksum fits, or without one, those of its parts.

    Reads a chunk at a time: a checkpoint may be larger than the memory that a rank has left.
    """
    if not path.is_file():  # a device may have no end
        return False
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SEAL_BYTES))
            seal = file.read()
            if seal.startswith(MARK) and len(seal) == SEAL_BYTES:
                return sha256(file, size - SEAL_BYTES) == seal.removeprefix(MARK).decode()
        with zipfile.ZipFile(path) as parts:  # saved by 01 to 05: torch.save writes a zip file
            return parts.testzip() is None
    except Exception:  # whatever a damaged file makes zipfile raise
        return False


def sha256(file: BinaryIO, size: int) -> str:
    """Return the checksum of the first `size` bytes of a file."""
    file.seek(0)
    digest = hashlib.sha256()
    while size and (chunk := file.read(min(size, CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def newest_whole(path: Path) -> Path | None:
    """Return the checkpoint at this path; if it is damaged, the one before; None without both."""
    candidates = (path, previous_path(path))
    for candidate in candidates:
        if is_whole(candidate):
            return candidate
    if damaged := [each for each in candidates if each.exists()]:
        raise CheckpointError(f"{damaged[0]} is damaged: resume from another one, or delete it")
    return None


def reseed(*key: int) -> None:
    """Restart torch's random numbers from a key such as (seed, epoch, step, rank)."""
    seed = random.Random(repr(key)).getrandbits(63)  # hashes the key: near keys give far seeds
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.3 ms without a GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class SeededPerSample(Dataset):
    """Makes the random crop of a sample a function of (seed, epoch, sample), in any process."""

    epoch = 0  # set it before each epoch

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if hasattr(self.dataset, "__getitems__"):  # a whole batch at a time, without random crops
            return self.dataset.__getitems__(indices)
        samples = []
        for index in indices:
            reseed(self.seed, self.epoch, index)
            samples.append(self.dataset[index])
        return samples


class SkipFirst(Sampler):
    """The order of another sampler without its first `skip` samples, which are not even loaded."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.skip = sampler, 0

    def __iter__(self) -> Iterator[int]:
        return islice(self.sampler, self.skip, None)

    def __len__(self) -> int:  # the length of the whole epoch
        return len(self.sampler)  # type: ignore[arg-type]


def main() -> None:
    path = Path(tempfile.mkdtemp(), "checkpoint.pt")
    for step in (1, 2, 3):
        with replacing(path) as file:
            torch.save({"weights": torch.full((1000,), step), "step": step}, file)
        print(f"saved step {step}; files: {sorted(each.name for each in path.parent.iterdir())}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # a single bit
    path.write_bytes(data)
    newest = newest_whole(path)
    print(f"a bit of {path.name} flips: the newest whole checkpoint is {newest and newest.name}")
    SAVED_HERE.clear()  # as in a new process, which resumes the run
    with replacing(path) as file:
        torch.save({"step": 4}, file)
    steps = [torch.load(each, weights_only=True)["step"] for each in (path, previous_path(path))]
    print(f"saved step {steps[0]}; the damaged file did not replace the earlier step {steps[1]}")


if __name__ == "__main__":
    main()
