"""Average the gradients of all ranks, in four ways that give the same mean.

Read them in this order. PerParameter sends a message for each parameter, as train.py does. Flat
sends one message for all of them, and Ring does so by an all-reduce of our own. Bucketed sends
several, each as soon as backward has filled it, as DistributedDataParallel does. compare.py shows
what they send. In a training loop:

    reducer = Bucketed(model)  # every rank now has rank 0's weights and buffers
    loss.backward()            # Bucketed sends in here
    reducer.finish()           # every rank now has the mean of all ranks' gradients
    optimizer.step()

If only some ranks have a gradient for a parameter, the others count as zero. If no rank has one,
the parameter stays without. Page: README.md
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from common.options import UsageError
from ring import ring_all_reduce
from shared import (
    broadcast_model,
    fill_missing_gradients,
    set_gradients,
    views_of,
    write_divided_gradient,
)


class PerParameter:
    """One all-reduce for each parameter, after backward."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = broadcast_model(model)

    @torch.no_grad()
    def finish(self) -> None:
        for gradient in fill_missing_gradients(self.parameters).values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()  # after the sum, as train.py does


class Flat:
    """One all-reduce for all gradients together, after backward.

    Gradients of several dtypes travel in the widest of them. Behind them, a number for each
    parameter says whether this rank has its gradient.
    """

    def __init__(self, model: nn.Module, all_reduce: Callable | None = None) -> None:
        self.parameters = broadcast_model(model)
        self.all_reduce = all_reduce or dist.all_reduce

    @torch.no_grad()
    def finish(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        has_gradient = [parameter.grad is not None for parameter in self.parameters]
        is_used = torch.tensor(has_gradient, device=gradients[0].device)
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), is_used])
        flat /= dist.get_world_size()  # before the sum, as DDP does: it could overflow in fp16
        self.all_reduce(flat)
        means, is_used = flat.tensor_split([-len(gradients)])
        set_gradients(views_of(means, self.parameters), is_used)


# DDP closes a bucket once it holds so many (dist._DEFAULT_FIRST_BUCKET_BYTES, and 25 MiB).
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


def cut_into_buckets(
    parameters: list[Parameter], first_bytes: int, other_bytes: int
) -> list[list[Parameter]]:
    """Return groups of one dtype and device, each closed when it has reached so many bytes.

    Backward begins at the last layer, so the groups go in reverse order (Li et al., PyTorch
    Distributed, VLDB 2020, section 3.2.3). The first one is small, so that it is full early.
    """
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple, list[Parameter]] = {}  # by kind: the group that is not full
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        if kind not in open_groups:
            open_groups[kind] = []
            groups.append(open_groups[kind])
        members = open_groups[kind]
        members.append(parameter)
        limit = first_bytes if members is groups[0] else other_bytes
        if sum(member.nbytes for member in members) >= limit:
            del open_groups[kind]
    return groups


class Bucket:
    """The gradients of some parameters in one flat tensor, which is sent as one message.

    Behind them, a number for each parameter says whether this rank has its gradient.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        size = sum(parameter.numel() for parameter in parameters)
        self.flat = parameters[0].new_zeros(size + len(parameters))
        self.views = views_of(self.flat[:size], parameters)
        self.is_used = self.flat[size:]
        self.is_used_of = dict(zip(parameters, self.is_used, strict=True))  # views of one number
        self.not_ready = set(parameters)  # their gradients are not in the bucket yet

    def store_gradient(self, parameter: Parameter) -> None:
        write_divided_gradient(parameter, self.views[parameter], self.is_used_of[parameter])
        self.not_ready.discard(parameter)


class Bucketed:
    """Several buckets, each sent as soon as it is full, while backward goes on.

    To accumulate, set `synchronize` to False before all backwards but the last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = broadcast_model(model)
        groups = cut_into_buckets(self.parameters, FIRST_BYTES, BUCKET_BYTES)
        self.buckets = [Bucket(members) for members in groups]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self.sent: list[Any] = []  # the all-reduces that are under way
        self.synchronize = True
        # A hook on the gradient itself would run before the gradient is added to .grad.
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    @torch.no_grad()
    def gradient_is_ready(self, parameter: Parameter) -> None:
        if not self.synchronize:
            return
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.not_ready:
            raise RuntimeError(
                "a second backward before finish(): call finish() after each, or set "
                "synchronize to False before all but the last"
            )
        bucket.store_gradient(parameter)
        self.send_full_buckets()

    def send_full_buckets(self) -> None:
        for bucket in self.buckets[len(self.sent) :]:
            if bucket.not_ready:  # later buckets wait, because all ranks must send in one order
                break
            self.sent.append(dist.all_reduce(bucket.flat, async_op=True))

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in self.buckets:
            for parameter in list(bucket.not_ready):  # parameters that backward has not used
                bucket.store_gradient(parameter)
        self.send_full_buckets()
        for work in self.sent:
            work.wait()
        for bucket in self.buckets:
            set_gradients(bucket.views, bucket.is_used)
            bucket.not_ready = set(bucket.views)
        self.sent = []


class Ring(Flat):
    """Flat, with the all-reduce of ring.py in place of gloo's."""

    def __init__(self, model: nn.Module) -> None:
        if dist.get_backend() == "nccl":
            raise UsageError("the ring sends from main memory, nccl from GPUs only: try gloo")
        super().__init__(model, ring_all_reduce)


class Reducer(Protocol):
    """The interface of all reducers: creating one is a collective, and so is each finish()."""

    def finish(self) -> None:
        """Leave the mean of all ranks' gradients on every rank; call this after backward."""


REDUCERS: dict[str, Callable[[nn.Module], Reducer]] = {
    "per-parameter": PerParameter,
    "flat": Flat,
    "bucketed": Bucketed,
    "ring": Ring,
}
