"""ZeRO-1 and ZeRO-2 by hand: each rank keeps 1/N of the optimizer's state, and of the gradients.

    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=1e-3)   # ZeRO-1: model goes into DDP
    optimizer = ShardedGradients(model.parameters(), AdamW, lr=1e-3)   # ZeRO-2: without DDP

Each rank updates the part of the parameters that it owns, then the ranks send each other what they
have updated (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.nn import Parameter

import local_ranks.chapters  # noqa: F401, it lets this import the reducers of stage 03
from reducers import cut_into_buckets
from shards import (
    SentGradients,
    ShardingError,
    Shards,
    all_gather_single,
    clip_grad_norm,
    require_elementwise,
    require_gradients,
)

BUCKET_BYTES = 4 * 2**20  # ZeRO-2 keeps up to three buckets of unsharded gradients in backward


class ShardedBucket(Shards):
    """Parameters that now lie side by side in memory, so that one message carries them all."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__([parameter.shape for parameter in parameters])
        self.parameters = parameters
        self.memory = self.lay_out([parameter.detach() for parameter in parameters])
        dist.broadcast(self.memory, src=0)  # every rank starts from rank 0's weights
        for parameter, view in zip(parameters, self.views(self.memory), strict=True):
            parameter.data = view
        self.owned = [Parameter(part) for part in self.parts_of(self.shard_of(self.memory))]
        # For ZeRO-2, during backward and after it:
        self.missing = set(parameters)  # those whose gradient has not come yet
        self.gradients: Tensor | None = None  # unsharded, flat
        self.slots: dict[Parameter, Tensor] = {}  # the view for the gradient of each parameter
        self.shard: Tensor | None = None  # the mean gradients that this rank owns

    def make_room(self) -> None:
        """Make room for the unsharded gradients. What backward does not bring stays zero."""
        self.gradients = self.new_flat(like=self.memory)
        self.slots = dict(zip(self.parameters, self.views(self.gradients), strict=True))

    def add_gradient(self, mean: Tensor) -> None:
        """Add the mean over the ranks of this rank's shard, (length,), to its gradients."""
        self.shard = mean if self.shard is None else self.shard + mean

    def send_updated(self) -> None:
        """Give every rank what the others have updated. Every rank must call it."""
        all_gather_single(self.memory, self.shard_of(self.memory).clone())


class ShardedOptimizer(optim.Optimizer):
    """ZeRO-1: wraps an optimizer that treats each element apart, like SGD, Adam and AdamW.

    Its param_groups hold the unsharded parameters, and a schedule may change their options.
    Frozen parameters stay as they are. Raises ShardingError as require_elementwise does.
    """

    def __init__(
        self, parameters: Iterable, optimizer_class: Callable[..., optim.Optimizer], **options: Any
    ) -> None:
        require_elementwise(optimizer_class)
        super().__init__(parameters, options)
        all_parameters = [p for group in self.param_groups for p in group["params"]]
        for frozen in (p for p in all_parameters if not p.requires_grad):
            dist.broadcast(frozen.detach(), src=0)
        trained = [p for p in all_parameters if p.requires_grad]
        groups = cut_into_buckets(trained, BUCKET_BYTES, BUCKET_BYTES)
        self.buckets = [ShardedBucket(members) for members in groups]
        self.owned: dict[Parameter, Parameter] = {}  # the part of each parameter
        for bucket in self.buckets:
            self.owned |= zip(bucket.parameters, bucket.owned, strict=True)
        inner_groups = []
        for group in self.param_groups:
            parts = [self.owned[p] for p in group["params"] if p in self.owned]
            inner_groups.append({**group, "params": parts})
        self.inner = optimizer_class(inner_groups)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: inner[key] for key in inner if key != "params"})  # defaults included

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):  # it is made, and so are its buckets
            why = "parameters cannot be added later, since the ranks have divided all of them"
            raise ShardingError(f"{why}: give the optimizer all groups when you make it")
        super().add_param_group(param_group)

    def give_gradients(self) -> None:
        """Give each part that this rank owns its part of the gradient, as a view."""
        for bucket in self.buckets:
            for p, own, part in zip(
                bucket.parameters, bucket.owned, bucket.owned_slices, strict=True
            ):
                own.grad = None if p.grad is None else p.grad.reshape(-1)[part]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # it takes no closure
        """Update this rank's parts, then exchange them. Every rank must call it."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: group[key] for key in group if key != "params"})
        self.give_gradients()
        self.inner.step()
        self.inner.zero_grad()
        for bucket in self.buckets:
            bucket.send_updated()

    def state_dict(self) -> dict[str, Any]:
        raise ShardingError(
            "a rank holds only its parts: save FullOptimizerState(model, optimizer)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ShardingError(
            "a rank holds only its parts: load FullOptimizerState(model, optimizer)"
        )


class ShardedGradients(ShardedOptimizer):
    """ZeRO-2: during backward, each rank gets only the mean gradient of what it owns.

    Call finish() after each backward, before clip_grad_norm() and step().
    """

    def __init__(
        self, parameters: Iterable, optimizer_class: Callable[..., optim.Optimizer], **options: Any
    ) -> None:
        super().__init__(parameters, optimizer_class, **options)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.next = 0  # the bucket to send next: all ranks send in the same order
        self.sent = SentGradients()
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.take)

    @torch.no_grad()
    def take(self, parameter: Parameter) -> None:
        """Take the gradient of this parameter, which backward has completed."""
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.missing:
            raise ShardingError("a second backward before finish(): call finish() after each")
        if bucket.gradients is None:
            bucket.make_room()
        assert parameter.grad is not None
        bucket.slots[parameter].copy_(parameter.grad)
        parameter.grad = None  # the bucket has it now
        bucket.missing.discard(parameter)
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.send(self.buckets[self.next])

    def send(self, bucket: ShardedBucket) -> None:
        """Send the mean of each shard to its owner, while backward continues."""
        if bucket.gradients is None:
            bucket.make_room()
        assert bucket.gradients is not None
        self.sent.send(bucket, bucket.gradients)
        bucket.gradients, bucket.slots = None, {}
        self.next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the gradients that are still under way. Every rank must call it."""
        while self.next < len(self.buckets):  # one that lacks a gradient, and those behind it
            self.send(self.buckets[self.next])
        self.sent.receive()
        self.next = 0
        parameters = [p for group in self.param_groups for p in group["params"]]
        missing = {
            f"parameter {number} of shape {tuple(p.shape)}": p in self.bucket_of[p].missing
            for number, p in enumerate(parameters)
            if p in self.bucket_of
        }
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
        require_gradients(missing, like=self.buckets[0].memory)

    def clip_grad_norm(self, limit: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most `limit`."""
        return clip_grad_norm([b.shard for b in self.buckets if b.shard is not None], [], limit)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            bucket.shard = None

    def give_gradients(self) -> None:
        if any(len(bucket.missing) < len(bucket.parameters) for bucket in self.buckets):
            raise ShardingError("step() before finish(): call finish() after each backward")
        for bucket in self.buckets:
            if bucket.shard is not None:
                parts = bucket.parts_of(bucket.shard)
                for own, gradient in zip(bucket.owned, parts, strict=True):
                    own.grad = gradient
