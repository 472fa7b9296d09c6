"""The networks: the small ConvNet of the MNIST tutorials, and torchvision's ResNets."""

import torchvision
from torch import Tensor, nn

from common.data import ImageSet
from common.options import UsageError


class Net(nn.Module):
    """The network of the MNIST tutorials, with dropout; or, to compare runs, with BatchNorm.

    With BatchNorm, it is wider, draws no random numbers, and is smooth: rounding changes little.
    """

    def __init__(self, channels: int, image_size: int, classes: int, batch_norm: bool) -> None:
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2  # 28 -> conv 24 -> pool 12 -> conv 8 -> pool 4
        if side < 1:
            raise UsageError(f"--model net needs --image-size 16 or more, got {image_size}")
        first, second = (16, 32) if batch_norm else (10, 20)  # channels
        self.conv1 = nn.Conv2d(channels, first, kernel_size=5)
        self.conv2 = nn.Conv2d(first, second, kernel_size=5)
        self.norm1 = nn.BatchNorm2d(first) if batch_norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(second) if batch_norm else nn.Dropout2d()
        self.pool = nn.AvgPool2d(2) if batch_norm else nn.MaxPool2d(2)
        self.activation = nn.SiLU() if batch_norm else nn.ReLU()
        self.fc1 = nn.Linear(second * side * side, 50)
        self.dropout = nn.Identity() if batch_norm else nn.Dropout()
        self.fc2 = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, 28, 28)
        x = self.activation(self.pool(self.norm1(self.conv1(x))))  # -> (B, first, 12, 12)
        x = self.activation(self.pool(self.norm2(self.conv2(x))))  # -> (B, second, 4, 4)
        return self.fc2(self.dropout(self.activation(self.fc1(x.flatten(1)))))  # -> (B, classes)


def build_model(name: str, dataset: ImageSet, batch: int | None = None) -> nn.Module:
    """Make a model for these images: (B, C, H, W) -> (B, classes).

    batch: the samples that BatchNorm normalizes together in training, if it is to be trained.
    UsageError if that leaves BatchNorm a single value for each channel, which has no variance.
    """
    image, _ = dataset[0]  # (C, H, W)
    channels, image_size, classes = image.shape[0], image.shape[-1], len(dataset.classes)
    if name in ("net", "net-bn"):
        return Net(channels, image_size, classes, batch_norm=name == "net-bn")
    if batch == 1 and image_size <= 32:  # a ResNet keeps a 32nd of each side: one pixel
        why = f"BatchNorm in {name} would get one value for each channel, which has no variance"
        raise UsageError(f"{why}: try twice the --batch-size")
    model = torchvision.models.get_model(name, num_classes=classes)
    if channels != 3:  # a ResNet expects color
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return model
