"""When is each gradient ready? Layers, their share of backward, and the buckets that they fill.

    python 04_ddp_torchrun/gradient_order.py

It uses the meta device, which has shapes and no numbers: it needs no GPU and no memory.
"""

import torch
import torchvision
from tabulate import tabulate
from torch import nn

from alpha_beta import Bucket
from common.models import Net
from common.options import Parser, UsageError

FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # DDP closes a bucket once it holds so many


def fill(gradients: list[tuple[float, float]]) -> list[Bucket]:
    """Buckets as DDP fills them, from (bytes, ready) of each gradient in the order of backward.

    The first is small, the others are large (Li et al., VLDB 2020, 3.2.3; 03's reducers.py).
    """
    buckets, size = [], 0.0
    for bytes_, ready in gradients:
        size += bytes_
        if size >= (BUCKET_BYTES if buckets else FIRST_BYTES):
            buckets.append(Bucket(size, ready))
            size = 0.0
    return [*buckets, Bucket(size, 1.0)] if size else buckets


def gradients_of(model: nn.Module, image: torch.Tensor) -> list[tuple[float, float]]:
    """(bytes, ready) of each gradient, from the last layer to the first.

    ready: the share of backward's multiplications that are done by then, on the meta device.
    """
    work: dict[nn.Module, float] = {}

    def count(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        weights = next(layer.parameters(recurse=False))  # the first one; a bias is small
        work[layer] = weights.numel() * output.numel() / output.shape[1]

    for layer in model.modules():
        if getattr(layer, "weight", None) is not None:
            layer.register_forward_hook(count)
    model.eval()(image)  # eval: BatchNorm takes any batch
    total, done, gradients = sum(work.values()), 0.0, []
    for layer in reversed([layer for layer in model.modules() if layer in work]):
        done += work[layer]
        sizes = [p.numel() * 4.0 for p in layer.parameters(recurse=False)]
        gradients += [(size, done / total) for size in reversed(sizes)]
    return gradients


def named(name: str, image_size: int) -> list[tuple[float, float]]:
    """The gradients of a stage's model, or of any classifier of torchvision."""
    with torch.device("meta"):
        if name in ("net", "net-bn"):
            image = torch.empty(1, 1, image_size, image_size)
            return gradients_of(Net(1, image_size, 10, batch_norm=name == "net-bn"), image)
        if name not in torchvision.models.list_models(torchvision.models):
            raise UsageError(f"--model {name}: expected net or a model of torchvision as resnet50")
        more = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
        model = torchvision.models.get_model(name, **more)
        return gradients_of(model, torch.empty(1, 3, image_size, image_size))


def main() -> None:
    rows = [
        (name, f"{bucket.size / 2**20:.1f}", f"{bucket.ready:.0%}")
        for name in ("resnet50", "vgg16")
        for bucket in fill(named(name, 224))
    ]
    print(
        tabulate(rows, ("model", "bucket, MiB", "ready after, of backward"), disable_numparse=True)
    )


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
