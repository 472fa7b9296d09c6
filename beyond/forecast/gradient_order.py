"""When is each gradient ready? Layers, their share of backward, and the buckets that they fill.

    python beyond/forecast/gradient_order.py

It uses the meta device, which has shapes and no numbers: it needs no GPU and no memory.
"""

from typing import Any

import torch
import torchvision
from tabulate import tabulate
from torch import nn

from common.models import Net
from common.options import Parser, UsageError
from step_model import BucketTime

# DDP closes a bucket once it holds so many (dist._DEFAULT_FIRST_BUCKET_BYTES, and 25 MiB).
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


def fill_buckets(gradients: list[tuple[float, float]]) -> list[BucketTime]:
    """Buckets as DDP fills them, from (bytes, ready) of each gradient in the order of backward.

    The first is small, the others are large (Li et al., VLDB 2020, 3.2.3; 03's reducers.py).
    """
    buckets, size = [], 0.0
    for bytes_, ready in gradients:
        size += bytes_
        if size >= (BUCKET_BYTES if buckets else FIRST_BYTES):
            buckets.append(BucketTime(size, ready))
            size = 0.0
    return [*buckets, BucketTime(size, 1.0)] if size else buckets


def gradients_of(model: nn.Module, images: torch.Tensor) -> list[tuple[float, float]]:
    """(bytes, ready) of each gradient, from the last layer to the first.

    ready: the share of backward's multiplications that are done by then. A layer multiplies each
    of its weights once for every pixel or token of its output. The rest is small and left out:
    biases, tables of positions, attention's queries times keys.
    """
    positions: dict[nn.Module, float] = {}  # pixels or tokens in the output of each layer called

    def note_positions(layer: nn.Module, _: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        weight = getattr(layer, "weight", None)  # (channels, ...), wherever the output has them
        channels = output.shape[-1] if weight is None else len(weight)
        positions[layer] = output.numel() / channels

    for layer in model.modules():
        layer.register_forward_hook(note_positions)
    model(images)

    def positions_of(name: str) -> float:
        """Count a layer's positions, or those of the attention that uses its weights by itself."""
        while (layer := model.get_submodule(name)) not in positions:
            name = name.rpartition(".")[0]
        return positions[layer]

    multiplications, gradients = 0.0, []
    for name, layer in reversed([*model.named_modules()]):
        parameters = dict(layer.named_parameters(recurse=False))
        weights = sum(p.numel() for key, p in parameters.items() if key.endswith("weight"))
        multiplications += weights * positions_of(name)
        gradients += [(p.numel() * 4.0, multiplications) for p in reversed(parameters.values())]
    return [(size, so_far / multiplications) for size, so_far in gradients]


def build_classifier(name: str, image_size: int) -> nn.Module:
    """A stage's model, or a classifier of torchvision. The caller has chosen the meta device."""
    if name in ("net", "net-bn"):
        return Net(1, image_size, 10, batch_norm=name == "net-bn")
    if name not in torchvision.models.list_models(torchvision.models):
        raise UsageError(f"--model {name}: expected net or a model of torchvision as resnet50")
    options = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    try:
        return torchvision.models.get_model(name, **options)
    except NotImplementedError:  # a regnet computes its widths with tensors, and reads them
        with torch.device("cpu"):
            return torchvision.models.get_model(name, **options).to("meta")


def gradients_of_classifier(name: str, image_size: int) -> list[tuple[float, float]]:
    """Call gradients_of with a stage's model, or with any classifier of torchvision."""
    with torch.device("meta"):
        channels = 1 if name in ("net", "net-bn") else 3
        try:
            model = build_classifier(name, image_size)
            two = torch.empty(2, channels, image_size, image_size)  # BatchNorm refuses one sample
            return gradients_of(model, two)
        except (AssertionError, RuntimeError) as error:
            why = f"--image-size {image_size} does not suit {name}: {error}"
            raise UsageError(f"{why}: try --image-size 224") from error


def main() -> None:
    rows = [
        (name, f"{bucket.size / 2**20:.1f}", f"{bucket.ready:.0%}")
        for name in ("resnet50", "vgg16")
        for bucket in fill_buckets(gradients_of_classifier(name, 224))
    ]
    print(
        tabulate(rows, ("model", "bucket, MiB", "ready after, of backward"), disable_numparse=True)
    )


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
