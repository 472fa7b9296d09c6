"""Writes checkpoints that survive a kill, a full disk or damage, and resumes inside an epoch.

python beyond/survive/durable.py
"""

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

MARK = b"\nsha256 "  # before the checksum, at the end of a file; torch.load ignores both


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. The text says what to do."""


def previous(path: Path) -> Path:
    """Where the checkpoint before this one is kept."""
    return path.with_name(f"{path.stem}.before{path.suffix}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Save in the block, at the path that this yields. A kill at any time leaves a whole one.

    Before the block, the checkpoint that is there becomes the previous one. After it, a checksum is
    added, and the file is forced to disk. CheckpointError if the block cannot write.
    """
    unfinished = path.with_suffix(".tmp")
    if is_whole(path):  # a damaged one must not replace the good one before it
        path.replace(previous(path))
    try:
        yield unfinished
        if not unfinished.exists():  # save_checkpoint has renamed it already
            path.replace(unfinished)  # too early: a power cut could leave zeros
        with unfinished.open("r+b") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
            file.write(MARK + digest.encode())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save's
        for each in (path, unfinished):
            each.unlink(missing_ok=True)
        why = f"cannot write {path} ({error}), the one before is whole"
        raise CheckpointError(f"{why}: make room, then --resume auto") from error


def set_aside(path: Path, resumed: Path | None) -> None:
    """Rename the checkpoints of an older run, or --resume auto would take them for this run's.

    resumed: the checkpoint that this run has started from. If it is one of them, they are its own.
    """
    own = (path.resolve(), previous(path).resolve())
    if resumed and resumed.resolve() in own:
        return
    for old in (path, previous(path)):
        if old.exists():
            old.replace(old.with_suffix(".old.pt"))


def is_whole(path: Path) -> bool:
    """Whether the file is there and its checksum fits; without a checksum, whether it loads."""
    try:
        data = path.read_bytes()
        body, mark, digest = data.rpartition(MARK)
        if mark and len(digest) == 64:
            return hashlib.sha256(body).hexdigest().encode() == digest
        torch.load(BytesIO(data), map_location="cpu", weights_only=True)  # saved by 01 to 05
    except Exception:  # whatever a damaged file makes torch.load raise
        return False
    return True


def newest_whole(path: Path) -> Path | None:
    """The checkpoint at this path; if it is damaged, the one before; None if there is neither."""
    found = [each for each in (path, previous(path)) if each.exists()]
    for each in found:
        if is_whole(each):
            return each
    if found:
        raise CheckpointError(f"{found[0]} is damaged: resume from another one, or delete it")
    return None


def reseed(*key: int) -> None:
    """Restart torch's random numbers from a key such as (seed, epoch, step, rank)."""
    seed = random.Random(repr(key)).getrandbits(63)  # hashes the key: near keys give far seeds
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.3 ms without a GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class Resumable(Dataset):
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


class Remaining(Sampler):
    """The order of another sampler without its first `skip` samples, which are not even loaded."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.skip = sampler, 0

    def __iter__(self) -> Iterator[int]:
        return islice(self.sampler, self.skip, None)

    def __len__(self) -> int:  # of the whole epoch
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
    found = newest_whole(path)
    print(f"a bit of {path.name} flips: the newest whole checkpoint is {found and found.name}")
    with replacing(path) as file:
        torch.save({"step": 4}, file)
    steps = [torch.load(each, weights_only=True)["step"] for each in (path, previous(path))]
    print(f"saved step {steps[0]}; the damaged file did not replace the earlier step {steps[1]}")


if __name__ == "__main__":
    main()
