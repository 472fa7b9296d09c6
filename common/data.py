"""Data sets. A small one is one uint8 tensor in memory, indexed a whole batch at a time."""

import fcntl
from argparse import Namespace
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import torchvision.transforms as T
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST, ImageFolder
from torchvision.datasets.folder import default_loader

from common.options import UsageError


class Digits(MNIST):
    """The 8×8 digits of this repository, in MNIST's file format. There is nothing to download."""

    raw_folder = str(Path(__file__).with_name("digits"))
    mirrors = ()


SOURCES = {"digits": Digits, "mnist": MNIST, "fashion-mnist": FashionMNIST, "cifar10": CIFAR10}
MEAN_AND_STD = {  # pixels count from 0 to 1; there is one number for each channel
    "digits": ([0.3053], [0.3233]),
    "mnist": ([0.1307], [0.3081]),
    "fashion-mnist": ([0.2860], [0.3530]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "imagefolder": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),  # ImageNet's
    "synthetic": ([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
}


class Images(Dataset):
    """A data set in memory: images (N, C, H, W) uint8 and labels (N,)."""

    def __init__(self, images: Tensor, labels: Tensor, classes: int, name: str) -> None:
        self.images, self.labels, self.classes = images, labels, range(classes)
        mean, std = torch.tensor(MEAN_AND_STD[name], dtype=torch.get_default_dtype())
        self.shift, self.scale = 255 * mean.view(-1, 1, 1), 1 / (255 * std.view(-1, 1, 1))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a sample, or a batch by one gather instead of a hundred."""
        images = self.images[index].to(self.shift.dtype)
        return images.sub_(self.shift).mul_(self.scale), self.labels[index]

    __getitems__ = __getitem__  # DataLoader calls it with the indices of a batch


ImageSet: TypeAlias = Images | ImageFolder  # both have `classes` and give (image, label)


def load_dataset(args: Namespace) -> tuple[ImageSet, ImageSet]:
    """Return the training set and the test set."""
    load = {"synthetic": synthesize, "imagefolder": read_folders}.get(args.dataset, read_arrays)
    try:
        train, test = load(args, train=True), load(args, train=False)
        if train.classes != test.classes:
            raise ValueError(f"classes {train.classes} for training, {test.classes} for the test")
    except (OSError, EOFError, RuntimeError, TypeError, ValueError, LookupError) as error:
        what, cure = (
            f"read --dataset {args.dataset} in --data-dir {args.data_dir}",
            "name the right folder",
        )
        if args.dataset == "synthetic":
            what, cure = "make --dataset synthetic", "try a smaller --image-size or fewer --classes"
        raise UsageError(f"cannot {what} ({type(error).__name__}: {error}): {cure}") from error
    require_a_batch(train, args)
    return train, test


def require_a_batch(train: Sized, args: Namespace) -> None:
    if len(train) < args.batch_size:
        why = f"--batch-size {args.batch_size} is more than the {len(train)} training samples"
        raise UsageError(f"{why}: try --batch-size {max(1, len(train) // 2)}")


def read_arrays(args: Namespace, train: bool) -> Images:
    """Read a data set of torchvision that fits into memory; download it if it is missing."""
    try:
        source = SOURCES[args.dataset](args.data_dir, train=train)
    except (RuntimeError, ValueError):  # the files are missing, or another process is writing them
        args.data_dir.mkdir(parents=True, exist_ok=True)
        with (args.data_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process downloads, and the others wait here
            source = SOURCES[args.dataset](args.data_dir, train=train, download=True)
    images, labels = torch.as_tensor(source.data), torch.as_tensor(source.targets)
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images, {len(labels)} labels")
    # (N, H, W) or (N, H, W, C) -> (N, C, H, W)
    images = images.permute(0, 3, 1, 2).contiguous() if images.ndim == 4 else images[:, None]
    if args.dataset == "digits":  # enlarged to the size that the network expects
        images = F.interpolate(images, size=28, mode="bilinear")
    return Images(images, labels, 10, args.dataset)


def read_folders(args: Namespace, train: bool) -> ImageFolder:
    """Read DATA-DIR/train/CLASS/*.jpg, or DATA-DIR/test/CLASS/*.jpg."""
    size, folder = args.image_size, args.data_dir / ("train" if train else "test")
    crop = [T.RandomResizedCrop(size), T.RandomHorizontalFlip()]
    if not train:
        crop = [T.Resize(size * 8 // 7), T.CenterCrop(size)]
    normalize = [T.ToTensor(), T.Normalize(*MEAN_AND_STD["imagefolder"])]
    return ImageFolder(folder, T.Compose(crop + normalize), loader=open_picture)


def open_picture(path: str) -> Any:
    try:
        return default_loader(path)
    except Exception as error:  # whatever a damaged or huge picture makes PIL raise
        raise UsageError(f"cannot read {path} ({error}): replace or remove it") from error


def synthesize(args: Namespace, train: bool) -> Images:
    """Make noise over a faint random picture per class: images of any size that can be learned."""
    shape, samples = (3, args.image_size, args.image_size), 2048 if train else 512
    generator = torch.Generator().manual_seed(args.seed)
    faint = torch.randint(0, 64, (args.classes, *shape), generator=generator, dtype=torch.uint8)
    generator.manual_seed(args.seed + samples)  # the same pictures, other noise in the test set
    labels = torch.randint(args.classes, (samples,), generator=generator)
    noise = torch.randint(0, 192, (samples, *shape), generator=generator, dtype=torch.uint8)
    for image, label in zip(noise, labels.tolist(), strict=True):
        image += faint[label]  # in place: faint[labels] would be a second copy of the data set
    return Images(noise, labels, args.classes, "synthetic")


def collate(batch: list | tuple) -> object:
    """Batch a list of samples; what Images gives is already a batch."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def loader_options(args: Namespace) -> dict[str, Any]:
    """Return what every DataLoader of a run gets beside its data set, batch size and sampler."""
    pin = args.device == "cuda"  # from pinned memory, a copy to the GPU need not wait
    limit = 600 if args.workers else 0  # seconds: a worker that finds /dev/shm full sends no batch
    return {"num_workers": args.workers, "timeout": limit, "collate_fn": collate, "pin_memory": pin}


def local_batch_size(global_batch: int, parts: int) -> int:
    """Return the size of `parts` equal pieces; unequal ones would need weighted gradients."""
    if global_batch % parts:
        larger = -(-global_batch // parts) * parts
        raise UsageError(f"--batch-size {global_batch} does not divide by {parts}: try {larger}")
    return global_batch // parts
