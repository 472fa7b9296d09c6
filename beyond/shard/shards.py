"""Tensors side by side in one flat tensor, which is cut into equal shards, one for each rank.

zero.py and fsdp.py lay out parameters, gradients and the optimizer's state in this way. The cuts do
not care where a tensor ends, so a rank may own a part of it, or nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, optim

# torch 2.13 has renamed both. The old name is asked for only where there is no new one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

NOT_ELEMENTWISE = (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam)


class ShardingError(ValueError):
    """Something cannot be sharded. The text says what arrived, why it fails, and what to do."""


def require_elementwise(optimizer_class: Any) -> None:
    """Raise ShardingError for torch's optimizers that look at whole parameters; of an optimizer
    from elsewhere (LAMB, Shampoo), it cannot know."""
    classes = getattr(optimizer_class, "__mro__", ())  # a function may also make the optimizer
    if set(NOT_ELEMENTWISE).intersection(classes):
        why = f"{optimizer_class.__name__} looks at whole parameters, and a rank owns only parts"
        raise ShardingError(f"{why} of them: use AdamW, Adam, SGD or another one by element")


def require_gradients(missing: dict[str, bool], like: Tensor) -> None:
    """Raise ShardingError on every rank if backward gave a parameter no gradient on any of them.

    missing: of each parameter's name, whether this rank lacks its gradient. like: a tensor of the
    device that sends. Every rank must call it.
    """
    ranks_without = like.new_tensor([*missing.values()], dtype=torch.float32)
    dist.all_reduce(ranks_without)
    without = zip(missing, ranks_without.tolist(), strict=True)
    names = [name for name, ranks in without if ranks]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        why = f"backward gave no gradient to {', '.join(names[:3])}{more} on at least one rank"
        raise ShardingError(f"{why}: freeze what is not used (requires_grad_(False))")


class Shards:
    """Where tensors of these shapes lie in the flat tensor, and what this rank owns of each."""

    def __init__(self, shapes: Sequence[Size]) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.shapes, self.sizes = list(shapes), [shape.numel() for shape in shapes]
        self.length = -(-sum(self.sizes) // self.world_size)  # the last shard is padded
        self.owned_slices: list[slice] = []  # what this rank owns of each flat tensor
        self.shard_slices: list[slice] = []  # where that lies in this rank's shard
        shard_start, tensor_start = self.rank * self.length, 0
        for size in self.sizes:
            tensor_end = tensor_start + size
            low = min(max(shard_start, tensor_start), tensor_end)
            high = min(max(shard_start + self.length, tensor_start), tensor_end)
            self.owned_slices.append(slice(low - tensor_start, high - tensor_start))
            self.shard_slices.append(slice(low - shard_start, high - shard_start))
            tensor_start = tensor_end

    def new_flat(self, like: Tensor) -> Tensor:
        """Return zeros, (world_size * length,), of the dtype and device of `like`."""
        return like.new_zeros(self.world_size * self.length)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors that lie in a flat one, each with its shape."""
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def lay_out(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new flat tensor that holds these."""
        flat = self.new_flat(like=tensors[0])
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def shard_of(self, flat: Tensor) -> Tensor:
        """Return this rank's shard, (length,), as a view."""
        return flat[self.rank * self.length :][: self.length]

    def parts_of(self, shard: Tensor) -> list[Tensor]:
        """Return what this rank owns of each tensor, (n,) with n >= 0, as views."""
        return [shard[own_slice] for own_slice in self.shard_slices]

    def cut(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return copies of what this rank owns of these tensors, so that the rest can be freed."""
        return [
            t.reshape(-1)[part].clone() for t, part in zip(tensors, self.owned_slices, strict=True)
        ]

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return all tensors, put together on rank 0, in CPU memory; nothing on the other ranks."""
        shard = parts[0].new_zeros(self.length)
        for view, part in zip(self.parts_of(shard), parts, strict=True):
            view.copy_(part)
        flat = self.new_flat(like=shard) if self.rank == 0 else None
        dist.gather(shard, [*flat.chunk(self.world_size)] if flat is not None else None)
        return self.views(flat.cpu()) if flat is not None else []


class ReduceScatter:
    """Each rank gets the mean of its own shard over all ranks, while the program goes on.

    flat: is divided here, before the sum, which float16 might not hold. DDP does the same.

    gloo's reduce_scatter_single sends as much as an all-reduce: it is one that drops what belongs
    to others (torch 2.15: benchmarks/results/shard.json). So with gloo, each rank sends to each
    other rank only the shard that this one owns, and adds up what it receives.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat.div_(dist.get_world_size())
        self.work: Any
        if dist.get_backend() == "gloo":
            self.received = torch.empty_like(flat)
            self.work = dist.all_to_all_single(self.received, flat, async_op=True)
        else:
            self.received = flat.new_empty(len(flat) // dist.get_world_size())
            self.work = reduce_scatter_single(self.received, flat, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the mean, and return it, (length,)."""
        self.work.wait()
        if len(self.received) < len(self.flat):
            return self.received
        return self.received.view(dist.get_world_size(), -1).sum(dim=0)


class SentGradients:
    """Gradients on their way to the ranks that own them, while backward continues."""

    def __init__(self) -> None:
        self.under_way: tuple[Any, ReduceScatter] | None = None

    def send(self, owner: Any, flat: Tensor) -> None:
        """Send one at a time: otherwise memory would grow with the network's delay.

        owner: a layer or a bucket, whose add_gradient takes the mean of this rank's shard.
        """
        self.receive()
        self.under_way = owner, ReduceScatter(flat)

    @torch.no_grad()
    def receive(self) -> None:
        if self.under_way:
            owner, message = self.under_way
            owner.add_gradient(message.wait())
            self.under_way = None


def squared_norm(gradient: Tensor) -> Tensor:
    """Return the squared norm in float64, ()."""
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


@torch.no_grad()
def clip_grad_norm(parts: Iterable[Tensor], replicated: Iterable[Tensor], limit: float) -> float:
    """Do what nn.utils.clip_grad_norm_ does, which would know only the norm of this rank's parts.

    parts: gradients of which each rank owns a part. replicated: those that every rank has in full.
    Returns the norm over all ranks. Every rank must call it.
    """
    parts, replicated = list(parts), list(replicated)
    square = torch.stack([squared_norm(part) for part in parts]).sum()
    dist.all_reduce(square)
    norm = (square + sum(map(squared_norm, replicated))).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # nan stays nan, as in torch
    for gradient in [*parts, *replicated]:
        gradient.mul_(scale)
    return float(norm)
