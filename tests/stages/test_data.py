"""The data sets and networks that the stages share are those that the pages describe."""

import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

import common.data
from common.data import load_dataset, loader_options
from common.models import build_model
from helpers.on_ranks import on_ranks
from local_ranks.train_stage import options


def test_the_digits_are_whole_normalized_and_come_in_batches():
    train_set, test_set = load_dataset(options())
    labels = torch.cat([train_set.labels, test_set.labels])
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    images, labels = train_set.__getitems__(range(1500))
    assert (len(train_set), len(test_set), *images.shape) == (1500, 297, 1500, 1, 28, 28)
    assert (images.mean().item(), images.std().item()) == pytest.approx((0, 1), abs=5e-3)
    torch.testing.assert_close(train_set[5], (images[5], labels[5]), rtol=0, atol=0)
    loader = torch.utils.data.DataLoader(train_set, 400, **loader_options(options()))
    assert [len(batch) for _, batch in loader] == [400, 400, 400, 300]


def test_synthetic_has_any_size_and_number_of_classes_and_the_test_set_shows_the_same_pictures():
    flags = ("--dataset=synthetic", "--image-size=17", "--classes=3")
    train_set, test_set = load_dataset(options(*flags))
    other_set, _ = load_dataset(options(*flags, "--seed=5"))
    assert (len(train_set), len(test_set), *train_set[0][0].shape) == (2048, 512, 3, 17, 17)
    train_means, test_means, other_means = (
        torch.stack([part.images[part.labels == label].double().mean(0) for label in range(3)])
        for part in (train_set, test_set, other_set)
    )
    assert (train_means - test_means).abs().mean() < 5
    # The controls: other classes, and another seed.
    assert (train_means - test_means.roll(1, 0)).abs().mean() > 10
    assert (train_means - other_means).abs().mean() > 10


def test_imagefolder_reads_ones_own_pictures(tmp_path):
    for part, (number, name) in product(("train", "test"), enumerate(("cat", "dog", "owl"))):
        (tmp_path / part / name).mkdir(parents=True)
        for file in range(4):
            picture = Image.new("RGB", (40, 30), (80 * number, 0, 255))
            picture.save(tmp_path / part / name / f"{file}.png")
    flags = ("--dataset=imagefolder", f"--data-dir={tmp_path}", "--batch-size=4", "--image-size=32")
    train_set, test_set = load_dataset(options(*flags))
    assert train_set.classes == ["cat", "dog", "owl"]
    assert train_set[0][0].shape == test_set[0][0].shape == (3, 32, 32)
    assert test_set[4][0][:, 0, 0].tolist() == pytest.approx([-0.748, -2.036, 2.640], abs=1e-3)
    assert build_model("net-bn", train_set)(train_set[0][0][None]).shape == (1, 3)


@pytest.mark.parametrize(("dataset", "channels"), [("digits", 1), ("synthetic", 3)])
def test_the_networks_are_those_of_the_pages_for_gray_and_color(dataset, channels):
    train_set, _ = load_dataset(options(f"--dataset={dataset}"))
    images, _ = train_set.__getitems__([0, 1])
    net, resnet = (build_model(name, train_set).eval() for name in ("net", "resnet18"))
    weights = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    assert weights == [(10, channels, 5, 5), (20, 10, 5, 5), (50, 320), (10, 50)]
    assert net(images).shape == resnet(images).shape == (2, 10)
    assert resnet.conv1.weight.shape == (64, channels, 7, 7)


class SlowDownload:
    """Stands in for torchvision's data set, with a download that takes a second."""

    data, targets = torch.zeros(1, 8, 8, dtype=torch.uint8), torch.zeros(1)

    def __init__(self, root: Path, train: bool, download: bool = False) -> None:
        if (root / "files").exists():
            return
        if not download:
            raise RuntimeError("the data set is not there")
        (root / f"fetched by process {time.monotonic_ns()}").touch()
        time.sleep(1)
        (root / "files").touch()


@pytest.mark.parametrize(("with_lock", "downloads"), [(True, 1), (False, 2)])
@on_ranks(2)
def test_one_rank_downloads_and_the_others_wait(rank, with_lock, downloads):
    """Without the lock, the control, both do."""
    common.data.SOURCES["mnist"] = SlowDownload
    if not with_lock:
        common.data.fcntl.flock = lambda *_: None
    dist.barrier()
    load_dataset(options("--dataset=mnist", "--data-dir=.", "--batch-size=1"))
    dist.barrier()
    assert len(list(Path().glob("fetched by *"))) == downloads
