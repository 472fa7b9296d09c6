"""The mean of a tensor over the ranks, in full, in bf16 or in int8, while the ranks go on.

wait = start_mean_in_int8(change)
...                                # meanwhile, the message travels
mean = wait()                      # every rank must reach both lines
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# torch 2.14 has renamed it, and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Wait = Callable[[], Tensor]  # waits until a mean has arrived, and returns it
CHUNK = 1024  # numbers that share a scale in int8


def start_mean_in_full(change: Tensor) -> Wait:
    """Start to average (P,) numbers over the ranks, in the dtype that they have."""
    total = change.clone()
    work = dist.all_reduce(total, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return total / dist.get_world_size()

    return wait


def start_mean_in_bf16(change: Tensor) -> Wait:
    wait = start_mean_in_full(change.bfloat16())
    return lambda: wait().to(change.dtype)


def start_mean_in_int8(change: Tensor) -> Wait:
    """The same in bytes, and in two halves, like those of a ring's all-reduce.

    An all-reduce would add up bytes, and they would overflow. So each rank gets everyone's bytes
    for one part of the numbers, averages that part in fp32, and sends the mean to everyone.
    """
    ranks = dist.get_world_size()
    padding = -len(change) % (ranks * CHUNK)
    parts = F.pad(change.float(), (0, padding)).view(ranks, -1, CHUNK)  # part i is for rank i
    all_parts = to_bytes(parts)  # (ranks, chunks, CHUNK + 4), of this rank's change
    own_part = torch.empty_like(all_parts)  # the same part of each rank's change
    work: Any = dist.all_to_all_single(own_part, all_parts, async_op=True)

    def wait() -> Tensor:
        work.wait()
        mean = to_bytes(from_bytes(own_part).mean(dim=0, keepdim=True))  # (1, chunks, CHUNK + 4)
        # A rank also takes the bytes of its own part, or its weights would differ from the others'.
        all_gather_single(all_parts, mean)
        return from_bytes(all_parts).flatten()[: len(change)].to(change.dtype)

    return wait


def to_bytes(values: Tensor) -> Tensor:
    """(..., CHUNK) fp32 -> (..., CHUNK + 4) int8: levels from -127 to 127, then their scale."""
    scale = values.abs().amax(dim=-1, keepdim=True) / 127
    levels = (values / scale.clamp(min=1e-30)).round().to(torch.int8)
    return torch.cat([levels, scale.view(torch.int8)], dim=-1)


def from_bytes(message: Tensor) -> Tensor:
    levels, scale = message.split([CHUNK, 4], dim=-1)
    return levels * scale.contiguous().view(torch.float32)


START_MEAN_IN = {"full": start_mean_in_full, "bf16": start_mean_in_bf16, "int8": start_mean_in_int8}


def sent_bytes(message: str, numbers: int, ranks: int) -> float:
    """What each rank sends for one mean of so many fp32 numbers."""
    chunks = -(-numbers // (ranks * CHUNK)) * ranks  # each rank's part is padded
    size = {"full": 4 * numbers, "bf16": 2 * numbers, "int8": chunks * (CHUNK + 4)}[message]
    return 2 * (ranks - 1) / ranks * size  # a reduce-scatter, or all-to-all, and an all-gather
