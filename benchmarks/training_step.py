"""One training step as the benchmarks time it: a model, perhaps DDP, an optimizer, one batch."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from common.models import Net


def build(name: str, samples: int = 0) -> tuple[nn.Module, Tensor]:
    """A model and a local batch for it, of so many samples if not of its usual size."""
    torch.manual_seed(0)
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10), torch.randn(samples or 32, 3, 64, 64)
    model: nn.Module = Net(1, 28, 10, batch_norm=name == "net-bn")
    if name == "mlp":
        wide, hidden = nn.Linear(784, 2048), nn.Linear(2048, 2048)
        model = nn.Sequential(nn.Flatten(), wide, nn.ReLU(), hidden, nn.ReLU(), nn.Linear(2048, 10))
    return model, torch.randn(samples or 64, 1, 28, 28)


def ddp_without_buffers(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """DDP without its broadcast of BatchNorm's statistics. Newer torch would rename the switch."""
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    return DistributedDataParallel(model, broadcast_buffers=False, **options)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.01, 0.9)


def train_step(
    model: Any,
    optimizer: Optimizer,
    images: Tensor,
    labels: Tensor,
    finish: Callable[[], object] = lambda: None,
    micro_batches: int = 1,
    dtype: torch.dtype | None = None,
    zeroed_in_place: bool = False,
) -> None:
    """Forward, backward, averaging by `finish` if DDP does not, optimizer, as in train.py.

    micro_batches: so many times these samples; DDP sends only the last one's gradients.
    dtype: of autocast. zeroed_in_place: the gradients keep their memory.
    """
    for micro_batch in range(1, micro_batches + 1):
        without_sending = model.no_sync() if micro_batch < micro_batches else nullcontext()
        with without_sending, torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        if micro_batch == 1:
            optimizer.zero_grad(set_to_none=not zeroed_in_place)
        loss.backward()
    finish()
    optimizer.step()


def make_step(
    model: nn.Module,
    images: Tensor,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    reducer: Callable[[nn.Module], Any] | None = None,
    **more: Any,
) -> Callable[[], None]:
    """One step with a wrapped copy of the model; reducer: of stage 03; more: of train_step."""
    model, labels = copy.deepcopy(model), torch.arange(len(images), device=images.device) % 10
    wrapped, optimizer = wrap(model), sgd(model)
    if reducer:
        more["finish"] = reducer(model).finish
    return lambda: train_step(wrapped, optimizer, images, labels, **more)
