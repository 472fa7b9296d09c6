"""The complete script with augmentation on the device, as a training on CIFAR-10 needs it.

    python beyond/survive/cifar10.py --amp bf16 --batch-size 512 --lr 0.1 --epochs 24
    python beyond/survive/cifar10.py --dataset digits --model net-bn --epochs 2

It is train.py, but the model crops and flips each batch before its first layer, while it trains:
a picture is padded by 4 pixels and cut at a random place, and half of the pictures are mirrored.
train.py itself leaves it out, so that the stages see the same pictures. The first line downloads
CIFAR-10; no GPU of this project has run it. Source: He et al., Deep residual learning (2015, arXiv
1512.03385), section 4.2.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train
from common.data import ImageSet

PIXELS = 4  # of padding on each side
DEFAULTS = {"--dataset": "cifar10", "--model": "resnet18", "--lr-decay": "cosine"}


def crop_and_flip(images: Tensor) -> Tensor:
    """A random part of each padded image, half of them mirrored: (B, C, H, W) -> (B, C, H, W)."""
    (batch, channels, height, width), device = images.shape, images.device
    top, left = torch.randint(2 * PIXELS + 1, (2, batch, 1), device=device)
    rows = top + torch.arange(height, device=device)  # (B, H)
    columns = left + torch.arange(width, device=device)  # (B, W)
    mirrored = torch.rand(batch, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    sample = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(-1, 1, 1)
    padded = F.pad(images, (PIXELS,) * 4)  # (B, C, H + 8, W + 8)
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None]]


def augment(model: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before forward: it changes what the model sees in training, and no name in it."""
    return (crop_and_flip(inputs[0]),) if model.training else inputs


def build_model(name: str, dataset: ImageSet) -> nn.Module:
    model = plain_model(name, dataset)
    model.register_forward_pre_hook(augment)
    return model


plain_model, train.build_model = train.build_model, build_model

if __name__ == "__main__":
    for flag, value in DEFAULTS.items():  # a flag of the call comes later, and wins
        sys.argv[1:1] = [flag, value]
    errors = (train.LaunchError, train.AgreementError, train.durable.CheckpointError)
    with train.exit_on(train.UsageError, *errors):
        train.main()
        train.dist.destroy_process_group()
