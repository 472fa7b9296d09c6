"""Turn a tensor of any dtype and layout into real numbers in float64, so that two can be compared.

A complex number becomes two of them, a sparse tensor is filled up with its zeros, a quantized one
gets the values it stands for, and a part of a tensor that is divided between the ranks becomes the
whole. For a tensor of any other kind, `NotComparableError` names the kind.
"""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor


class NotComparableError(Exception):
    """A tensor has no numbers to compare; the text is the kind of the tensor."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that is divided between the ranks; all of them must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def kind_of(tensor: Tensor) -> str:
    """Say what a tensor is: class, layout and device where they are unusual, and its dtype."""
    name = "" if type(tensor) in (Tensor, torch.nn.Parameter) else f"{type(tensor).__name__}, "
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout}, "
    device = "" if not tensor.is_meta else "on the meta device, "
    return f"{name}{layout}{device}{tensor.dtype}"


def has_no_memory(tensor: Tensor) -> bool:
    """Is the memory freed, as fully_shard does after a forward? Reading it would crash."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_plain = is_plain and not is_functorch_wrapped_tensor(tensor)
    return is_plain and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def comparable(tensor: Tensor) -> Tensor:
    """Turn a tensor into a vector (n,) in float64, without a gradient.

    Raises NotComparableError if nothing is known about a tensor of this kind.
    """
    try:
        tensor = full_tensor(tensor.detach())
        if tensor.is_meta or has_no_memory(tensor):
            raise NotComparableError(kind_of(tensor))
        if tensor.is_nested:
            return torch.cat([comparable(part) for part in tensor.unbind()])
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        return tensor.reshape(-1).to(torch.float64)
    except NotComparableError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # no such operation
        raise NotComparableError(kind_of(tensor)) from None


def precision(dtype: torch.dtype) -> float:
    """Return the spacing of a dtype's numbers near 1; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
WIDE |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def widened(tensor: Tensor) -> Tensor:
    """Return usual real numbers in float64, complex ones in complex128, and all else unchanged."""
    return tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor
