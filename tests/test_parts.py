"""The hand-written parts, one by one: DataPartitioner, SyncBatchNorm, the data."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import ROOT, chapter, default_dtype, run_ranks
from torch import nn

from common import data
from common.data import load_dataset
from common.models import build_model
from common.options import make_parser

# --- DataPartitioner


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 49])
def test_partitions_are_disjoint_and_equally_long(parts):
    partitioner = chapter("03", "partition").DataPartitioner(range(1500), [1 / parts] * parts, 3)
    shards = [list(partitioner.use(rank)) for rank in range(parts)]
    assert {len(shard) for shard in shards} == {1500 // parts}
    used = [index for shard in shards for index in shard]
    assert len(set(used)) == len(used) > 1500 - parts


def test_partitions_of_another_seed_overlap():
    """The control: all ranks must use the same seed."""
    cut = chapter("03", "partition").DataPartitioner
    first, second = cut(range(100), [0.5, 0.5], 1).use(0), cut(range(100), [0.5, 0.5], 2).use(1)
    assert set(first) & set(second)


# --- SyncBatchNorm

SHAPES = [(8, 3), (8, 3, 5), (8, 3, 4, 5), (8, 3, 2, 3, 4)]
BATCHNORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def global_batch(shape, ranks):
    """Rows for all ranks, and how many belong to each: uneven on purpose."""
    generator = torch.Generator().manual_seed(5)
    sizes = [2 + 3 * rank for rank in range(ranks)]
    rows = torch.randn(sum(sizes), *shape[1:], generator=generator, dtype=torch.float64)
    weights = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    return rows * 3 + 5, weights, sizes


def batchnorm(shape, momentum, affine):
    torch.manual_seed(9)
    layer = BATCHNORMS[len(shape)](shape[1], momentum=momentum, affine=affine).double()
    if affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def normalize(layer, rows, weights):
    rows = rows.clone().requires_grad_()
    output = layer(rows)
    (output * weights).sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    return output.detach(), rows.grad, gradients, layer.state_dict()


def _sync(rank, shape, ranks, momentum, affine):
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    rows, weights, sizes = global_batch(shape, ranks)
    layer = chapter("05", "sync_batchnorm").convert(batchnorm(shape, momentum, affine))
    results = normalize(layer, rows.split(sizes)[rank], weights.split(sizes)[rank])
    dist.destroy_process_group()
    return type(layer).__name__, results


@pytest.mark.parametrize(
    ("shape", "ranks", "momentum", "affine"),
    [
        *[(shape, 2, 0.1, True) for shape in SHAPES],
        *[((8, 3, 4, 5), ranks, 0.3, True) for ranks in (1, 3, 4)],
        ((8, 3, 4, 5), 2, None, True),
        ((8, 3, 4, 5), 2, 0.1, False),
    ],
)
def test_sync_batchnorm_is_batchnorm_of_the_global_batch(shape, ranks, momentum, affine):
    rows, weights, _ = global_batch(shape, ranks)
    whole = normalize(batchnorm(shape, momentum, affine), rows, weights)
    kinds, parts = zip(*run_ranks(ranks, _sync, shape, ranks, momentum, affine), strict=True)
    assert set(kinds) == {"SyncBatchNorm"}
    close = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole[0], **close)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole[1], **close)
    for index, gradient in enumerate(whole[2]):  # DDP averages these; here they are summed
        torch.testing.assert_close(sum(part[2][index] for part in parts), gradient, **close)
    for part in parts:
        torch.testing.assert_close(part[3], whole[3], **close)


def test_convert_replaces_every_batchnorm_and_keeps_parameters_and_names():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(4)))
    names, parameters = list(model.state_dict()), list(model.parameters())
    module = chapter("05", "sync_batchnorm")
    converted = module.convert(model.eval())
    assert list(converted.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, converted.parameters(), strict=True))
    assert not any(layer.training for layer in converted.modules())
    kinds = [type(layer) for layer in converted.modules() if hasattr(layer, "running_mean")]
    assert kinds == [module.SyncBatchNorm, module.SyncBatchNorm]


def _torchs_own(rank):
    dist.init_process_group("gloo", rank=rank, world_size=1)
    try:
        nn.SyncBatchNorm(3)(torch.randn(4, 3))
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def test_torch_refuses_cpu_tensors_even_in_a_world_of_one():
    """Why SyncBatchNorm is written by hand here."""
    assert "expected input tensor to be on GPU" in run_ranks(1, _torchs_own)[0]


# --- Data and models


def options(*flags):
    return make_parser("", "").parse_args([f"--data-dir={ROOT / 'data'}", *flags])


def test_the_digits_are_whole():
    train_set, test_set = load_dataset(options())
    assert (len(train_set), len(test_set)) == (1500, 297)
    labels = torch.cat([train_set.labels, test_set.labels])
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert train_set[0][0].shape == (1, 28, 28)


def test_the_digits_are_what_their_script_writes(tmp_path):
    pytest.importorskip("sklearn", reason="data/digits/make.py needs: pip install scikit-learn")
    script = tmp_path / "make.py"
    script.write_text((ROOT / "data" / "digits" / "make.py").read_text())
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)
    for file in (ROOT / "data" / "digits").glob("*ubyte"):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_one_sample_is_a_batch_of_one():
    train_set, _ = load_dataset(options())
    images, labels = train_set.__getitems__([3, 5])
    assert torch.equal(images[1], train_set[5][0])
    assert torch.equal(labels[1], train_set[5][1])


def test_images_have_the_default_dtype():
    with default_dtype(torch.float64):
        train_set, _ = load_dataset(options("--dataset=synthetic"))
        assert train_set[0][0].dtype == torch.float64


@pytest.mark.parametrize(("size", "classes"), [(16, 2), (33, 7)])
def test_synthetic_has_any_size_and_number_of_classes(size, classes):
    flags = ("--dataset=synthetic", f"--image-size={size}", f"--classes={classes}")
    train_set, test_set = load_dataset(options(*flags))
    assert train_set[0][0].shape == (3, size, size)
    assert set(train_set.labels.tolist()) == set(range(classes)) == set(test_set.labels.tolist())


def test_color_pictures_are_contiguous_in_memory(monkeypatch):
    """As (N, H, W, C) behind a permuted view, gradients of DDP would have other strides."""

    def source(root, train):
        pictures = torch.randint(256, (130, 8, 8, 3), dtype=torch.uint8).numpy()
        return SimpleNamespace(data=pictures, targets=[0] * 130)

    monkeypatch.setitem(data.SOURCES, "cifar10", source)
    train_set, _ = load_dataset(options("--dataset=cifar10"))
    assert train_set.images.shape == (130, 3, 8, 8)
    assert train_set.images.is_contiguous()
    assert train_set[[3, 5]][0].is_contiguous()


@pytest.mark.parametrize("in_use", [True, False])
def test_batches_are_pinned_if_this_process_uses_a_gpu(in_use, monkeypatch):
    """Not if there is one that it does not use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    train_set, _ = load_dataset(options("--device=cpu"))
    assert data.make_loader(train_set, 10).pin_memory == in_use


def test_imagefolder_reads_ones_own_pictures(tmp_path):
    from PIL import Image

    for part in ("train", "test"):
        for number, name in enumerate(("cat", "dog", "owl")):
            (tmp_path / part / name).mkdir(parents=True)
            for picture in range(4):
                color = (80 * number, 20 * picture, 255)
                Image.new("RGB", (40, 30), color).save(tmp_path / part / name / f"{picture}.png")
    flags = ("--dataset=imagefolder", f"--data-dir={tmp_path}", "--batch-size=4", "--image-size=32")
    train_set, _ = load_dataset(options(*flags))
    assert train_set.classes == ["cat", "dog", "owl"]
    assert train_set[0][0].shape == (3, 32, 32)
    assert build_model("net-bn", train_set)(train_set[0][0][None]).shape == (1, 3)


def test_net_is_the_network_of_the_documents():
    train_set, _ = load_dataset(options())
    sizes = {name: tuple(p.shape) for name, p in build_model("net", train_set).named_parameters()}
    assert sizes["conv1.weight"] == (10, 1, 5, 5)
    assert sizes["conv2.weight"] == (20, 10, 5, 5)
    assert sizes["fc1.weight"] == (50, 320)
    assert sizes["fc2.weight"] == (10, 50)


@pytest.mark.parametrize("channels", [1, 3])
def test_resnet_takes_gray_and_color(channels):
    train_set, _ = load_dataset(options(f"--dataset={'digits' if channels == 1 else 'synthetic'}"))
    model = build_model("resnet18", train_set).eval()
    images, _ = train_set.__getitems__([0, 1])
    assert model(images).shape == (2, 10)
