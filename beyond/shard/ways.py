"""The four ways to train on N ranks: by hand, and with PyTorch's own classes.

none        DDP: each rank holds all parameters, gradients and optimizer state
optimizer   ZeRO-1: each rank holds 1/N of the optimizer's state
gradients   ZeRO-2: ... and 1/N of the gradients
parameters  ZeRO-3, or FSDP: ... and 1/N of the parameters
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp import FSDP, layers_of
from full_state import FullModelState, FullOptimizerState, State
from zero import ShardedGradients, ShardedOptimizer

WAYS = ("none", "optimizer", "gradients", "parameters")


class Training(NamedTuple):
    """A model on its way through training. Each of these calls is for all ranks."""

    model: nn.Module  # what forward is called on
    optimizer: Optimizer
    finish: Callable[[], None]  # after backward: wait for the gradients that are under way
    clip: Callable[[float], Any]  # after that: limit the norm of all gradients
    full_state: tuple[Any, Any]  # model and optimizer as a checkpoint holds them


def by_hand(
    way: str,
    model: nn.Module,
    optimizer_class: type[Optimizer],
    fsdp_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Training:
    """options: of the optimizer. fsdp_options: dtype, recompute and device of FSDP."""
    if way == "parameters":
        fsdp = FSDP(model, **(fsdp_options or {}))
        optimizer = optimizer_class(fsdp.parameters(), **options)
        full_state = FullModelState(fsdp), FullOptimizerState(fsdp, optimizer)
        return Training(fsdp, optimizer, fsdp.finish, fsdp.clip_grad_norm, full_state)
    if way == "gradients":  # it sends the gradients itself, so there is no DDP
        zero = ShardedGradients(model.parameters(), optimizer_class, **options)
        full_state = FullModelState(model), FullOptimizerState(model, zero)
        return Training(model, zero, zero.finish, zero.clip_grad_norm, full_state)
    if way == "optimizer":  # it moves the parameters in memory: before DDP
        optimizer = ShardedOptimizer(model.parameters(), optimizer_class, **options)
    else:
        optimizer = optimizer_class(model.parameters(), **options)
    return with_ddp(model, optimizer, FullOptimizerState(model, optimizer))


def with_ddp(model: nn.Module, optimizer: Optimizer, optimizer_state: Any) -> Training:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy is kept

    def clip(limit: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)

    full_state = FullModelState(model), optimizer_state
    return Training(ddp, optimizer, lambda: None, clip, full_state)


def by_library(
    way: str, model: nn.Module, optimizer_class: type[Optimizer], **options: Any
) -> Training:
    """The same with PyTorch's classes."""
    if way == "none":
        return by_hand(way, model, optimizer_class, **options)
    if way == "optimizer":
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
        return with_ddp(model, zero, ConsolidatedOptimizerState(zero))
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)  # fully_shard sends no weights
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in [*(layer for _, layer in layers_of(model)), model]:
        # Not resharded after forward, parameters stay unsharded until the end of backward: ZeRO-2.
        fully_shard(layer, mesh=mesh, reshard_after_forward=way == "parameters")
    optimizer = optimizer_class(model.parameters(), **options)

    def clip(limit: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)  # of DTensors: over all ranks

    full_state = LibraryModelState(model), LibraryOptimizerState(model, optimizer)
    return Training(model, optimizer, lambda: None, clip, full_state)


class ConsolidatedOptimizerState:
    """A ZeroRedundancyOptimizer as a checkpoint holds it."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer
        self.load_state_dict, self.collected = optimizer.load_state_dict, State()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def collect(self) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        self.collected = self.optimizer.state_dict() if dist.get_rank() == 0 else {}

    def state_dict(self) -> State:
        return self.collected


FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)  # in CPU memory


class LibraryModelState:
    """A model of fully_shard as a checkpoint holds it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.collected = model, State()

    def collect(self) -> None:
        self.collected = get_model_state_dict(self.model, options=FULL_ON_RANK_0)

    def state_dict(self) -> State:
        return self.collected

    def load_state_dict(self, state: State) -> None:
        set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=True))


class LibraryOptimizerState:
    """Its optimizer: PyTorch names the parameters where the stages' files number them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self.collected = model, optimizer, State()
        self.names = [name for name, _ in model.named_parameters()]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def collect(self) -> None:
        named: Any = get_optimizer_state_dict(self.model, self.optimizer, options=FULL_ON_RANK_0)
        if dist.get_rank() != 0:
            return
        number = {name: i for i, name in enumerate(self.names)}
        state = {number[name]: row for name, row in named["state"].items()}
        groups = []
        for group in named["param_groups"]:
            groups.append({**group, "params": [number[name] for name in group["params"]]})
        self.collected = {"state": dict(sorted(state.items())), "param_groups": groups}

    def state_dict(self) -> State:
        return self.collected

    def load_state_dict(self, saved: State) -> None:
        state = {self.names[number]: row for number, row in saved["state"].items()}
        groups = []
        for group in saved["param_groups"]:
            groups.append({**group, "params": [self.names[number] for number in group["params"]]})
        named: Any = {"state": state, "param_groups": groups}
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, named, options=options)
