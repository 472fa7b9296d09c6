"""The networks: the small ConvNet of the MNIST tutorials, and torchvision's ResNets."""

import copy

import torch
import torchvision
from torch import Tensor, nn

from common.data import ImageSet
from common.options import UsageError


class Net(nn.Module):
    """Two convolutions and two linear layers: with dropout, or with BatchNorm in its place.

    The first is the network of the MNIST tutorials. The second is for comparing runs: it draws no
    random numbers, and it is smooth. At the kinks of max-pooling and ReLU, the last bit of a number
    can decide which way a gradient goes: two fp32 runs of the same computation would drift apart.
    """

    def __init__(self, channels: int, image_size: int, classes: int, batch_norm: bool) -> None:
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2  # 28 -> conv 24 -> pool 12 -> conv 8 -> pool 4
        if side < 1:
            raise UsageError(f"net needs images of 16 pixels or more, got {image_size}")
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.norm1 = nn.BatchNorm2d(10) if batch_norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(20) if batch_norm else nn.Dropout2d()
        self.pool = nn.AvgPool2d(2) if batch_norm else nn.MaxPool2d(2)
        self.activation = nn.SiLU() if batch_norm else nn.ReLU()
        self.fc1 = nn.Linear(20 * side * side, 50)
        self.dropout = nn.Identity() if batch_norm else nn.Dropout()
        self.fc2 = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, 28, 28)
        x = self.activation(self.pool(self.norm1(self.conv1(x))))  # -> (B, 10, 12, 12)
        x = self.activation(self.pool(self.norm2(self.conv2(x))))  # -> (B, 20, 4, 4)
        x = self.dropout(self.activation(self.fc1(x.flatten(1))))  # -> (B, 50)
        return self.fc2(x)  # -> (B, classes)


def build_model(name: str, dataset: ImageSet, batch: int = 2) -> nn.Module:
    """The model for the images and classes of this data set, with fresh weights.

    It maps images (B, C, H, W) to logits (B, classes). batch: the samples that a BatchNorm layer
    normalises together. UsageError if that is one value for a channel, which has no variance.
    """
    image, _ = dataset[0]  # (C, H, W)
    channels, image_size, classes = image.shape[0], image.shape[-1], len(dataset.classes)
    if name in ("net", "net-bn"):
        return Net(channels, image_size, classes, batch_norm=name == "net-bn")
    model = torchvision.models.get_model(name, num_classes=classes)
    if channels != 3:  # a ResNet expects colour
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    model = model.to(torch.get_default_dtype())
    if batch == 1:
        try:
            copy.deepcopy(model)(image[None])  # a copy: the statistics of this one start fresh
        except ValueError as error:
            raise UsageError(
                f"BatchNorm gets one sample, of one pixel in the last layers of {name}, and one "
                "value has no variance: try a larger --batch-size or a smaller --accumulate"
            ) from error
    return model
