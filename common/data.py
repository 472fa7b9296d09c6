"""The data sets. Small ones are one uint8 tensor each, fetched a whole batch at a time."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
import torchvision.transforms as T
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST, ImageFolder
from torchvision.datasets.mnist import read_image_file, read_label_file

from common.options import UsageError, reseed
from common.watchdog import end_with_parent

DOWNLOADS = {"mnist": MNIST, "fashion-mnist": FashionMNIST, "cifar10": CIFAR10}
IDX_FOLDERS = {"digits": "digits", "mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
MEAN_AND_STD = {  # of the training pixels on a scale from 0 to 1, one number a channel
    "digits": ([0.3053], [0.3233]),
    "mnist": ([0.1307], [0.3081]),
    "fashion-mnist": ([0.2860], [0.3530]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "imagefolder": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),  # ImageNet's
    "synthetic": ([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
}


class Images(Dataset):
    """A whole data set in memory: images (N, C, H, W) and labels (N,)."""

    def __init__(self, images: Tensor, labels: Tensor, classes: int, name: str) -> None:
        self.images, self.labels, self.classes = images, labels.long(), list(range(classes))
        mean, std = torch.tensor(MEAN_AND_STD[name], dtype=torch.get_default_dtype())
        self.shift, self.scale = 255 * mean.view(-1, 1, 1), 1 / (255 * std.view(-1, 1, 1))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """DataLoader calls this with the indices of a batch: one gather instead of a hundred."""
        index = torch.as_tensor(indices)
        images = self.images[index].to(self.shift.dtype)
        return images.sub_(self.shift).mul_(self.scale), self.labels[index]


class Pictures(ImageFolder):
    """Files in folders. How one is cropped depends on (seed, epoch, picture) alone.

    So it does not matter which process loads it, nor what that process did before.
    """

    seed = epoch = 0

    def __getitem__(self, index: int) -> tuple:
        reseed(self.seed, self.epoch, index)
        return super().__getitem__(index)


ImageSet: TypeAlias = Images | Pictures  # both have `classes` and give (image, label)


class Remaining(Sampler):
    """The order of another sampler without its first `skip` samples."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.skip = sampler, 0

    def __iter__(self) -> Iterator[int]:
        return islice(self.sampler, self.skip, None)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # of the whole epoch


def prepare_dataset(args: Namespace) -> None:
    """Download the data set if it can be downloaded and is not there yet."""
    if not args.data_dir.is_dir() and args.dataset != "synthetic":
        raise UsageError(
            f"--data-dir {args.data_dir} is no folder: name the one that holds the data sets, or "
            "start from the root of the repository"
        )
    if args.dataset in DOWNLOADS:
        try:
            DOWNLOADS[args.dataset](args.data_dir, download=True)
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            raise UsageError(
                f"{args.dataset} is not in {args.data_dir} and cannot be downloaded ({error}): "
                "name the folder that holds it with --data-dir, or try --dataset digits"
            ) from error


def load_dataset(args: Namespace) -> tuple[ImageSet, ImageSet]:
    """The training set and the test set."""
    if args.dataset in IDX_FOLDERS:
        folder = args.data_dir / IDX_FOLDERS[args.dataset]
        train, test = (_read_idx(folder, part, args.dataset) for part in ("train", "t10k"))
    elif args.dataset == "cifar10":
        train, test = (_read_cifar10(args.data_dir, train) for train in (True, False))
    elif args.dataset == "imagefolder":
        train, test = (_read_folder(args, part) for part in ("train", "test"))
    else:
        train, test = (_synthesise(args, samples) for samples in (2048, 512))
    if train.classes != test.classes:
        raise UsageError(
            f"the training set has the classes {train.classes}, the test set {test.classes}: "
            "give both folders the same ones"
        )
    if len(train) < args.batch_size:
        raise UsageError(
            f"--batch-size {args.batch_size} is more than the {len(train)} training samples of "
            f"{args.dataset}: try --batch-size {max(1, len(train) // 2)}"
        )
    return train, test


def make_loader(
    dataset: Dataset, batch_size: int, sampler: Sampler | None = None, workers: int = 0
) -> DataLoader:
    """Batches of (images, labels): in the dataset's order, or in a sampler's and then full only."""
    return DataLoader(
        dataset,
        batch_size,
        sampler=None if sampler is None else Remaining(sampler),
        drop_last=sampler is not None,  # every training step sees exactly one global batch
        num_workers=workers,
        worker_init_fn=end_with_parent,  # or a killed rank leaves its loaders behind
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
    )


def start_epoch(loader: DataLoader, epoch: int, steps_done: int) -> Iterator:
    """The batches of this epoch that are still to do; those done are not even loaded."""
    loader.sampler.skip = steps_done * loader.batch_size  # type: ignore[attr-defined, operator]
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    dataset.epoch = epoch  # type: ignore[attr-defined]
    return iter(loader)


def _collate(batch: list | tuple) -> object:
    """Images already fetches whole batches; other data sets give a list of samples."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def _read_idx(folder: Path, part: str, name: str) -> Images:
    pixels, labels = folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte"
    for path in (pixels, labels):
        if not path.is_file():
            raise UsageError(f"{path} is missing: name the folder above it with --data-dir")
    try:
        images, targets = read_image_file(str(pixels))[:, None], read_label_file(str(labels))
        if len(images) != len(targets) or not 0 <= targets.max() < 10:
            raise ValueError(f"{len(images)} images, {len(targets)} labels")
    except (ValueError, RuntimeError, AssertionError, LookupError, TypeError) as error:
        raise UsageError(
            f"{pixels} or {labels.name} is cut off or no IDX file: copy both again"
        ) from error
    if name == "digits":  # 8×8 pixels, shown at the size that the network was made for
        images = F.interpolate(images, size=28, mode="bilinear")
    return Images(images, targets, 10, name)


def _read_cifar10(data_dir: Path, train: bool) -> Images:
    try:
        source = CIFAR10(data_dir, train=train)
    except Exception as error:
        raise UsageError(
            f"cifar10 in {data_dir} is missing or damaged: delete it, try again"
        ) from error
    return Images(
        torch.from_numpy(source.data).permute(0, 3, 1, 2),
        torch.tensor(source.targets),
        10,
        "cifar10",
    )


def _read_folder(args: Namespace, part: str) -> Pictures:
    size = args.image_size
    views = {
        "train": [T.RandomResizedCrop(size), T.RandomHorizontalFlip()],
        "test": [T.Resize(size * 8 // 7), T.CenterCrop(size)],
    }
    last = [T.ToTensor(), T.Normalize(*MEAN_AND_STD["imagefolder"])]
    try:
        pictures = Pictures(args.data_dir / part, T.Compose(views[part] + last))
    except OSError as error:
        raise UsageError(
            f"no pictures in {args.data_dir / part}: imagefolder expects train/CLASS/*.png and "
            "test/CLASS/*.png below --data-dir"
        ) from error
    pictures.seed = args.seed
    return pictures


def _synthesise(args: Namespace, samples: int) -> Images:
    """Noise over one faint random picture a class: any size, and there is something to learn."""
    shape = (3, args.image_size, args.image_size)
    generator = torch.Generator().manual_seed(args.seed)
    pictures = torch.randint(0, 64, (args.classes, *shape), generator=generator, dtype=torch.uint8)
    generator.manual_seed(args.seed + samples)  # same pictures, other noise for the test set
    labels = torch.randint(args.classes, (samples,), generator=generator)
    noise = torch.randint(0, 192, (samples, *shape), generator=generator, dtype=torch.uint8)
    return Images(noise + pictures[labels], labels, args.classes, "synthetic")
