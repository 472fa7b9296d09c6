"""Data sets that a test trains on in a moment."""

from functools import cache
from itertools import product
from pathlib import Path

import torch
from PIL import Image

from common.data import load_dataset
from local_ranks.machine import scratch_folder
from local_ranks.train_stage import options


def random_pictures(folder: Path) -> tuple[str, ...]:
    """12 pictures for training and 12 for the test, in this folder; the flags that use them."""
    for part, number in product(("train", "test"), range(12)):
        path = folder / part / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8).numpy()).save(path)
    flags = ("--dataset=imagefolder", f"--data-dir={folder}", "--batch-size=4")
    return (*flags, "--image-size=32")


@cache
def few_digits() -> tuple[str, ...]:
    """The flags of a data set of 300 digits, a fifth of all, and 60 for the test: MNIST's files."""
    raw = scratch_folder() / "MNIST" / "raw"
    raw.mkdir(parents=True)
    sets = zip(("train", "t10k"), load_dataset(options()), (300, 60), strict=True)
    for name, digits, count in sets:
        for kind, values in (("images", digits.images[:, 0]), ("labels", digits.labels)):
            part = values[:count].to(torch.uint8)
            sizes = (0x800 + part.ndim, *part.shape)
            header = b"".join(size.to_bytes(4, "big") for size in sizes)
            file = raw / f"{name}-{kind}-idx{part.ndim}-ubyte"
            file.write_bytes(header + part.numpy().tobytes())
    return ("--dataset=mnist", f"--data-dir={raw.parents[1]}")
