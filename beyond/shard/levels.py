"""How much is divided among N ranks, in four levels: by hand, and with PyTorch's own classes.

none        DDP: each rank holds all parameters, gradients and optimizer state
optimizer   ZeRO-1: each rank holds 1/N of the optimizer's state
gradients   ZeRO-2: ... and 1/N of the gradients
parameters  ZeRO-3, or FSDP: ... and 1/N of the parameters
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp import FSDP, layers_of
from full_state import FullModelState, FullOptimizerState
from library_state import LibraryModelState, LibraryOptimizerState, LibraryZeroState
from shards import require_elementwise
from zero import ShardedGradients, ShardedOptimizer

LEVELS = ("none", "optimizer", "gradients", "parameters")
KINDS = ("parameters", "gradients", "optimizer state")


def formula(level: str, world_size: int) -> dict[str, float]:
    """Return multiples of the parameters' bytes: what a rank holds, by Figure 1 of the ZeRO paper.

    Adam's state is two numbers for each parameter, here in the same format.
    """
    divided = LEVELS.index(level)  # none, optimizer, gradients, parameters
    parameters, gradients, state = (1 / world_size if divided >= n else 1.0 for n in (3, 2, 1))
    return dict(zip(KINDS, (parameters, gradients, 2 * state), strict=True))


class ShardedTraining(NamedTuple):
    """A model on its way through training. Each of these calls is for all ranks."""

    model: nn.Module  # what forward is called on
    optimizer: Optimizer
    finish: Callable[[], None]  # after backward: wait for the gradients that are under way
    clip: Callable[[float], Any]  # after that: limit the norm of all gradients
    model_state: Any  # the model as a checkpoint holds it
    optimizer_state: Any  # the optimizer as a checkpoint holds it


def by_hand(
    level: str,
    model: nn.Module,
    optimizer_class: type[Optimizer],
    **options: Any,
) -> ShardedTraining:
    """Make a training with our own classes. options: of the optimizer."""
    if level == "parameters":
        require_elementwise(optimizer_class)
        fsdp = FSDP(model)
        optimizer = optimizer_class(fsdp.parameters(), **options)
        states = FullModelState(fsdp), FullOptimizerState(fsdp, optimizer)
        return ShardedTraining(fsdp, optimizer, fsdp.finish, fsdp.clip_grad_norm, *states)
    if level == "gradients":  # ZeRO-2 sends the gradients itself, so there is no DDP
        zero = ShardedGradients(model.parameters(), optimizer_class, **options)
        for buffer in model.buffers():  # the optimizer knows the parameters alone
            dist.broadcast(buffer, src=0)
        states = FullModelState(model), FullOptimizerState(model, zero)
        return ShardedTraining(model, zero, zero.finish, zero.clip_grad_norm, *states)
    if level == "optimizer":  # it moves the parameters in memory: before DDP
        optimizer = ShardedOptimizer(model.parameters(), optimizer_class, **options)
    else:
        optimizer = optimizer_class(model.parameters(), **options)
    return with_ddp(model, optimizer, FullOptimizerState(model, optimizer))


def with_ddp(model: nn.Module, optimizer: Optimizer, optimizer_state: Any) -> ShardedTraining:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy is kept
    states = FullModelState(model), optimizer_state
    return ShardedTraining(ddp, optimizer, lambda: None, plain_clip(model), *states)


def plain_clip(model: nn.Module) -> Callable[[float], Any]:
    """Return torch's own clipping of this model, which adds up DTensors over all ranks."""
    return lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


def by_library(
    level: str, model: nn.Module, optimizer_class: type[Optimizer], **options: Any
) -> ShardedTraining:
    """Make a training with PyTorch's classes. options: of the optimizer."""
    if level == "none":
        return by_hand(level, model, optimizer_class, **options)
    if level == "optimizer":
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
        return with_ddp(model, zero, LibraryZeroState(zero))
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)  # fully_shard sends no weights
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in [*(layer for _, layer in layers_of(model)), model]:
        # Not resharded after forward, parameters stay unsharded until the end of backward: ZeRO-2.
        fully_shard(layer, mesh=mesh, reshard_after_forward=level == "parameters")
    optimizer = optimizer_class(model.parameters(), **options)
    states = LibraryModelState(model), LibraryOptimizerState(model, optimizer)
    return ShardedTraining(model, optimizer, lambda: None, plain_clip(model), *states)
