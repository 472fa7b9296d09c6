"""Is the gradient of a GAN's discriminator under DDP that of one process?

    torchrun --standalone --nproc-per-node=2 beyond/convert/gan.py

The networks are small ones of DCGAN's kind (Radford et al., 2015), in float64 and with
SyncBatchNorm. Each rank takes half of the real images and half of the fake ones. The gradient is
compared with the one that a single process computes from all images, in DCGAN's order: a forward
and a backward for the real images, then a forward and a backward for the fake ones
(https://github.com/pytorch/examples/blob/main/dcgan/main.py).
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets.mnist import read_image_file

sys.path.insert(1, str(Path(__file__).parents[2] / "05_amp_syncbn"))
from sync_batchnorm import convert_sync_batchnorm  # torch's SyncBatchNorm trains on GPUs only

DIGITS = Path(__file__).parents[2] / "common" / "digits" / "train-images-idx3-ubyte"


def initialize(layer: nn.Module) -> None:
    """As DCGAN's script does."""
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(layer.weight, 0.0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1.0, 0.02)


def build_generator() -> nn.Module:
    """(B, 16, 1, 1) -> (B, 1, 28, 28)"""
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 7, 1, 0, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def build_discriminator() -> nn.Module:
    """(B, 1, 28, 28) -> (B, 1, 1, 1)"""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 3, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 4, 1, 0, bias=False),
    )


def loss_of(scores: Tensor, target: float) -> Tensor:
    """The mean over these images of how wrong the discriminator is: target 1 is real, 0 is fake."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def two_pairs(critic: nn.Module, real: Tensor, fake: Tensor) -> None:
    """As in DCGAN's script: BatchNorm sees real images only, then fake images only."""
    loss_of(critic(real), 1.0).backward()
    loss_of(critic(fake), 0.0).backward()


def one_batch(critic: nn.Module, real: Tensor, fake: Tensor) -> None:
    """BatchNorm sees real and fake images together."""
    scores = critic(torch.cat([real, fake]))
    (loss_of(scores[: len(real)], 1.0) + loss_of(scores[len(real) :], 0.0)).backward()


def two_forwards(critic: nn.Module, real: Tensor, fake: Tensor) -> None:
    """As two_pairs, with one backward at the end."""
    (loss_of(critic(real), 1.0) + loss_of(critic(fake), 0.0)).backward()


def gradient(step: Callable, critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The gradient of all parameters after this step, in one row."""
    step(critic, real, fake)
    return torch.cat([parameter.grad.flatten() for parameter in critic.parameters()])


def measure() -> dict[str, list[float]]:
    """How far the gradient is from DCGAN's, relative to it: in one process, and on these ranks."""
    torch.manual_seed(0)
    digits = read_image_file(str(DIGITS))
    real = digits[:64, None].double() / 127.5 - 1  # (64, 1, 8, 8), from -1 to 1 as the generator's
    real = F.interpolate(real, size=28, mode="bilinear")  # (64, 1, 28, 28)
    fake = build_generator().apply(initialize)(torch.randn(64, 16, 1, 1)).detach()
    critic = build_discriminator().apply(initialize)
    expected = gradient(two_pairs, deepcopy(critic), real, fake)
    share = slice(dist.get_rank(), None, dist.get_world_size())  # of two ranks: every second image

    def error(step: Callable, synchronize: Callable = convert_sync_batchnorm) -> list[float]:
        ddp = DistributedDataParallel(synchronize(deepcopy(critic)))
        one_process = gradient(step, deepcopy(critic), real, fake)
        ranks = gradient(step, ddp, real[share], fake[share])
        return [float((x - expected).norm() / expected.norm()) for x in (one_process, ranks)]

    return {
        "two pairs": error(two_pairs),
        "two forwards, one backward": error(two_forwards),
        "real and fake in one batch": error(one_batch),
        "two pairs, BatchNorm not synchronized": error(two_pairs, lambda model: model),
    }


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rows = measure()  # every rank must reach this line
    if dist.get_rank() == 0:
        for name, (one_process, ranks) in rows.items():
            print(f"{name:<38} one process {one_process:.1%}   DDP {ranks:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
