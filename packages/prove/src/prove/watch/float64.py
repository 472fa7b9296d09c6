"""Make a script compute in float64, where rounding is far smaller than any mistake.

Tensors become float64 when they are made, and models before they are used.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prove.comparable import WIDE, widened
from prove.watch.rank_run import OWN_FOLDERS, callers, wrap, wrap_everywhere


def compute_in_float64() -> None:
    torch.set_default_dtype(torch.float64)

    @wrap(Tensor, "float")
    def double(original: Callable, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        caller = next(file for file, *_ in callers() if os.path.dirname(file) not in OWN_FOLDERS)
        by_torch = "/torch/amp/" in caller  # GradScaler needs the float32 that it asks for
        return original(tensor, *args, **kwargs) if by_torch else tensor.double()

    @wrap(nn.Module, "to")
    def to(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep a model in float64: converting it back and forth would lose parameter hooks."""
        kwargs = {name: widest(value) for name, value in kwargs.items()}
        return original(module, *map(widest, args), **kwargs)

    for name in ("double", "float", "half", "bfloat16"):
        setattr(nn.Module, name, widen)
    wrap(Tensor, "cfloat")(lambda original, tensor, *_, **__: tensor.to(torch.complex128))


def widen(module: nn.Module) -> nn.Module:
    """Widen a module in place, also its complex tensors, which nn.Module.double leaves alone."""
    return module._apply(widened)


def widest(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return torch.complex128 if isinstance(value, torch.dtype) and value.is_complex else value


def make_double(module: nn.Module) -> None:
    """Widen a model that has come from a file in float32."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(hasattr(tensor, "full_tensor") for tensor in tensors):
        return
    if any(tensor.dtype in WIDE for tensor in tensors):
        if any(map(accumulator_is_held, module.parameters())):
            raise TypeError("hooks that average gradients are lost if the model becomes float64")
        widen(module)


def accumulator_is_held(p: Tensor) -> bool:
    """Does other code hold the autograd node that adds to p.grad?

    Megatron hangs its averaging on this node, and torch makes a new one, without that hook, when p
    gets another dtype.
    """

    def metadata() -> Any:
        node: Any = p.view_as(p).grad_fn
        return node.next_functions[0][0].metadata

    with torch.enable_grad():
        if not p.requires_grad or not p.is_leaf:
            return False
        metadata()["prove"] = True  # the mark survives only if other code holds the node
        return "prove" in metadata()


def watch_sharding() -> None:
    """Let fully_shard keep float64 parameters, whatever its mixed precision policy says."""
    import torch.distributed.fsdp as fsdp

    @wrap_everywhere(fsdp, "fully_shard")
    def shard(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
        for part in module if isinstance(module, list | tuple) else [module]:
            make_double(part)
        kwargs.pop("mp_policy", None)
        return original(module, *args, **kwargs)


def install() -> None:
    compute_in_float64()
    watch_sharding()
