"""Tensors of the program, as this backend reads and writes them: flat, and unknown to autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = list[Tensor]  # mostly one: torch once had a tensor for each device of a process


def without_autograd(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that autograd neither records nor counts changes of.

    A result of inference_mode may be changed too, by any thread and after that mode has ended.
    """
    if not tensor.is_inference():
        return tensor.data
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype)
        where = tensor.storage_offset(), tensor.shape, tensor.stride()
        alias.set_(tensor.untyped_storage(), *where)
        alias = alias.conj() if tensor.is_conj() else alias
        return torch._neg_view(alias) if tensor.is_neg() else alias


def flat(tensor: Tensor) -> Tensor:
    """Return all elements, (N,), unknown to autograd: a view if that is possible, or a copy.

    A view that only says "conjugated" or "negative" is copied, since others read the memory itself.
    """
    if not tensor.is_cpu or tensor.layout != torch.strided:
        got = f"{tensor.layout}, on {tensor.device}"
        raise TypeError(f"shm: got a tensor of {got}, expected a dense one on the CPU: try gloo")
    values = without_autograd(tensor).resolve_conj().resolve_neg()
    return values if values.dim() == 1 else values.reshape(-1)


def without_gaps(values: Tensor) -> Tensor:
    """Return the elements, (N,), as a message holds them: a copy only if there are gaps."""
    has_gaps = values.stride(0) != 1
    return values.clone(memory_format=torch.contiguous_format) if has_gaps else values


def put_back(tensor: Tensor, values: Tensor) -> None:
    """Write `values`, which flat() has made of the tensor, into it if they are a copy."""
    if values.data_ptr() != tensor.data_ptr():
        without_autograd(tensor).copy_(values.view_as(tensor))


def require_own_memory(outputs: Sequence[Tensor | Tensors]) -> None:
    """Refuse a tensor that expand() has made, where several elements are one number in memory."""
    for output in outputs:
        if isinstance(output, list):
            require_own_memory(output)
        elif output.layout == torch.strided and not output.is_contiguous():
            strides = zip(output.stride(), output.shape, strict=True)
            if any(stride == 0 and size > 1 for stride, size in strides):
                got = f"strides {output.stride()} of {tuple(output.shape)}"
                expected = "memory for each element: try .contiguous()"
                raise ValueError(f"shm: got {got}, expected {expected}")


def memory_range(values: Tensor) -> tuple[int, int]:
    """Return the addresses at which the memory of a tensor, (N,), begins and ends."""
    begin, steps = values.data_ptr(), len(values) - 1
    return begin, begin + (steps * values.stride(0) + 1) * values.itemsize


def copy_if_overlapping(values: Tensor, outputs: Tensors, own: int) -> Tensor:
    """Return the values; a copy if writing an output would change them.

    outputs[own] may be the values themselves, because then nothing is written there.
    """
    begin, end = memory_range(values)
    for rank, output in enumerate(outputs):
        output_begin, output_end = memory_range(output)
        is_in_place = rank == own and (output_begin, output_end) == (begin, end)
        if begin < output_end and output_begin < end and not is_in_place:
            return values.clone()
    return values


def require_same_size(tensors: Tensors, expected: Tensor) -> None:
    """Raise ValueError if a tensor has another number of elements, or dtype, than `expected`."""
    for tensor in tensors:
        if tensor.numel() != expected.numel() or tensor.dtype != expected.dtype:
            got = f"{tensor.numel()} elements of {tensor.dtype}"
            raise ValueError(f"shm: got {got}, expected {expected.numel()} of {expected.dtype}")


def equal_parts(tensor: Tensor, world_size: int) -> Tensors:
    """Return one part of equal size for each rank, as views."""
    if tensor.numel() % world_size or not tensor.is_contiguous():
        got = f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        what = f"a contiguous tensor whose elements can be divided among {world_size} ranks"
        raise ValueError(f"shm: got {got}, expected {what}")
    return list(without_autograd(tensor).view(world_size, -1))


def split_rows(tensor: Tensor, sizes: list[int], world_size: int) -> Tensors:
    """Split the first dimension into one part per rank, of equal sizes if `sizes` is empty."""
    rows = len(tensor)
    is_even = not sizes
    sizes = sizes or [rows // world_size] * world_size
    if sum(sizes) != rows or len(sizes) != world_size:
        expected = f"one size per rank, {rows} together"
        if is_even:
            expected = f"rows for {world_size} ranks"
        raise ValueError(f"shm: got {rows if is_even else sizes}, expected {expected}")
    return list(without_autograd(tensor).split(sizes))
