"""Read the tensors of models and optimizers: whole, by name, or as two numbers.

`project` makes these numbers: the inner product of a tensor with a fixed vector, and its norm. The
first is linear, so the mean over ranks can be checked without sending a gradient anywhere.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from prove.comparable import NotComparableError, comparable, full_tensor
from prove.rank_record import Projection
from prove.watch.batches import copy_tensors

not_comparable: set[str] = set()  # kinds of tensors without a projection


@cache
def projection_vector(size: int, device: torch.device) -> Tensor:
    return torch.cos(torch.arange(size, dtype=torch.float64, device=device) * 1.7 + 0.3)


def full_copies(tensors: list) -> list:
    return [
        None if tensor is None else copy_tensors(full_tensor(tensor.detach())) for tensor in tensors
    ]


def is_divided(module: nn.Module) -> bool:
    """Is a module divided between the ranks by tensor parallelism or by the older FSDP?

    Modules of fully_shard do not count, because their tensors can be gathered.
    """
    classes = {base.__name__ for part in module.modules() for base in type(part).__mro__}
    divided = [p for p in module.parameters() if hasattr(p, "full_tensor")]
    if "FullyShardedDataParallel" in classes:
        return True
    is_plain = all(p.device_mesh.ndim == 1 for p in divided)  # type: ignore[attr-defined]
    return bool(divided) and not ("FSDPModule" in classes and is_plain)


def project(tensor: Tensor) -> Projection:
    """Return a linear function of a tensor, and its norm; zeros if it cannot be compared."""
    try:
        flat = comparable(tensor)
    except NotComparableError as error:
        not_comparable.add(str(error))
        return 0.0, 0.0
    return float(flat @ projection_vector(len(flat), flat.device)), float(flat.norm())


def project_buffers(module: nn.Module) -> dict[str, Projection]:
    return {without_wrappers(name): project(b) for name, b in module.named_buffers() if b.numel()}


def without_wrappers(name: str) -> str:
    """Remove the parts that wrappers add to a name."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def parameters_of(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def rates_of(optimizer: Any) -> list[float]:
    """Return the learning rates of an optimizer; a stand-in for a step by hand has none."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def momenta_of(optimizer: Any) -> list[float]:
    numbers: list[Any] = []
    for group in optimizer.param_groups:
        betas = group.get("betas", ())
        numbers += [group.get("momentum"), *(betas if isinstance(betas, list | tuple) else ())]
    return [float(n) for n in numbers if isinstance(n, int | float | Tensor)]


def schedule_settings(optimizer: Any) -> list[dict]:
    """Return what a scheduler may change: learning rates, and for some classes momentum."""
    names = ("lr", "momentum", "betas")
    groups = optimizer.param_groups
    return [
        {name: copy_tensors(group[name]) for name in names if name in group} for group in groups
    ]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that have values, with names that no wrapper changes."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor):
            yield without_wrappers(name), tensor
