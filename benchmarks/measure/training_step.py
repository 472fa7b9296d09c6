"""Take one training step as the benchmarks time it: a model, perhaps DDP, an optimizer, a batch."""

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
from sync_batchnorm import convert_sync_batchnorm as by_stage_05


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Make a model and a local batch for it."""
    torch.manual_seed(0)
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10), torch.randn(32, 3, 64, 64)
    model: nn.Module = Net(1, 28, 10, batch_norm=name == "net-bn")
    if name == "mlp":
        wide, hidden = nn.Linear(784, 2048), nn.Linear(2048, 2048)
        model = nn.Sequential(nn.Flatten(), wide, nn.ReLU(), hidden, nn.ReLU(), nn.Linear(2048, 10))
    return model, torch.randn(64, 1, 28, 28)


def ddp_without_buffers(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap in DDP without its broadcast of BatchNorm's statistics.

    Newer versions of torch warn that this switch will get another name.
    """
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    return DistributedDataParallel(model, broadcast_buffers=False, **options)


def with_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Convert to SyncBatchNorm: on a CPU by stage 05's layers, because PyTorch's need a GPU."""
    on_gpu = next(model.parameters()).is_cuda
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if on_gpu else by_stage_05(model)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.01, 0.9)


class TrainingStep:
    """A model, perhaps wrapped in DDP, its optimizer and a batch; each call takes one step.

    reducer: one of stage 03's, which averages if DDP does not. micro_batches: how often a step
    takes the batch; DDP sends only the last one's gradients. dtype: what autocast computes in.
    zeroed_in_place: the gradients keep their memory.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        wrap: Callable[[nn.Module], Any] | None = None,
        reducer: Callable[[nn.Module], Any] | None = None,
        optimizer: Callable[[nn.Module], Optimizer] = sgd,
        micro_batches: int = 1,
        dtype: torch.dtype | None = None,
        zeroed_in_place: bool = False,
        classes: int = 10,
    ) -> None:
        self.images = images
        self.labels = torch.arange(len(images), device=images.device) % classes
        self.model = model
        self.wrapped: Any = wrap(model) if wrap else model
        self.finish = reducer(model).finish if reducer else lambda: None
        self.optimizer = optimizer(model)
        self.micro_batches = micro_batches
        self.dtype = dtype
        self.zeroed_in_place = zeroed_in_place

    def __call__(self) -> None:
        """Forward, backward, averaging, optimizer, as in train.py."""
        for micro_batch in range(1, self.micro_batches + 1):
            is_last = micro_batch == self.micro_batches
            with nullcontext() if is_last else self.wrapped.no_sync(), self.autocast():
                loss = F.cross_entropy(self.wrapped(self.images), self.labels)
            if micro_batch == 1:
                self.optimizer.zero_grad(set_to_none=not self.zeroed_in_place)
            loss.backward()
        self.finish()
        self.optimizer.step()

    def autocast(self) -> torch.autocast:
        device = self.images.device.type
        return torch.autocast(device, self.dtype, enabled=self.dtype is not None)


def step_on_copy(model: nn.Module, images: Tensor, *args: Any, **options: Any) -> TrainingStep:
    """Make a step on a copy of the model, so that all variants begin with the same weights."""
    return TrainingStep(copy.deepcopy(model), images, *args, **options)
