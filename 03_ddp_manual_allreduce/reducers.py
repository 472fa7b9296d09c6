"""Average the gradients of all ranks, in five ways that give the same mean.

    python 03_ddp_manual_allreduce/reducers.py

Read them in this order. PerParameter sends a message for each parameter, as train.py does. Flat
sends one message for all of them, and ring does so by an all-reduce of our own. Bucketed sends
several, each as soon as backward has filled it, as DistributedDataParallel does. SharedMemory, in
shared_memory.py, sends no gradient at all. In a training loop:

    reducer = Bucketed(model)  # every rank now has rank 0's weights and buffers
    loss.backward()            # Bucketed sends in here
    reducer.finish()           # every rank now has the mean of all ranks' gradients
    optimizer.step()

If only some ranks have a gradient for a parameter, the others count as zero. If no rank has one,
the parameter stays without. Page: reducers.md
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchvision
from tabulate import tabulate
from torch import nn
from torch.nn import Parameter

from averaging import broadcast_model, used_gradients, views_of, write_divided_gradient
from common.models import Net
from common.options import Parser, UsageError, exit_on
from ranks import start
from ring import ring_all_reduce
from shared_memory import SharedMemory


class PerParameter:
    """One all-reduce for each parameter, after backward."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = broadcast_model(model)

    @torch.no_grad()
    def finish(self) -> None:
        for gradient in used_gradients(self.parameters).values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


class Flat:
    """One all-reduce for all gradients together, after backward.

    Gradients of several dtypes travel in the widest of them.
    """

    def __init__(self, model: nn.Module, all_reduce: Callable | None = None) -> None:
        self.parameters = broadcast_model(model)
        self.all_reduce = all_reduce or dist.all_reduce

    @torch.no_grad()
    def finish(self) -> None:
        gradients = used_gradients(self.parameters)
        if not gradients:  # on no rank, so all of them return here
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        flat /= dist.get_world_size()
        self.all_reduce(flat)
        for parameter, mean in views_of(flat, list(gradients)).items():
            gradients[parameter].copy_(mean)


# As in torch's DDP (dist._DEFAULT_FIRST_BUCKET_BYTES).
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


def cut_into_buckets(parameters: list[Parameter], first: int, others: int) -> list[list[Parameter]]:
    """Groups of one dtype and device, each closed when it has reached so many bytes.

    Backward begins at the last layer, so the groups go in reverse order (Li et al., PyTorch
    Distributed, VLDB 2020, section 3.2.3). The first one is small, so that it is full early.
    """
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple, list[Parameter]] = {}  # the one that is not full, of each kind
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        if kind not in open_groups:
            open_groups[kind] = []
            groups.append(open_groups[kind])
        members = open_groups[kind]
        members.append(parameter)
        limit = first if members is groups[0] else others
        if sum(member.nbytes for member in members) >= limit:
            del open_groups[kind]
    return groups


class Bucket:
    """The gradients of some parameters in one flat tensor, which is sent as one message."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
        self.views = views_of(self.flat, parameters)
        self.missing = set(parameters)  # these are not in the bucket yet

    def put(self, parameter: Parameter) -> None:
        write_divided_gradient(parameter, self.views[parameter])
        self.missing.discard(parameter)


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
        if parameter not in bucket.missing:
            raise RuntimeError(
                "a second backward before finish(): call finish() after each, or set "
                "synchronize to False before all but the last"
            )
        bucket.put(parameter)
        self.send_full_buckets()

    def send_full_buckets(self) -> None:
        for bucket in self.buckets[len(self.sent) :]:
            if bucket.missing:  # later buckets wait, because all ranks must send in one order
                break
            self.sent.append(dist.all_reduce(bucket.flat, async_op=True))

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in self.buckets:
            for parameter in list(bucket.missing):  # backward has not used them
                bucket.put(parameter)
        self.send_full_buckets()
        for work in self.sent:
            work.wait()
        for parameter, gradient in used_gradients(self.parameters).items():
            gradient.copy_(self.bucket_of[parameter].views[parameter])
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)
        self.sent = []


def ring(model: nn.Module) -> Flat:
    """Flat, with the all-reduce of ring.py in place of gloo's."""
    if dist.get_backend() == "nccl":
        raise UsageError("the ring sends from main memory, nccl from GPUs only: try gloo")
    return Flat(model, ring_all_reduce)


REDUCERS: dict[str, Callable[[nn.Module], Any]] = {
    "per-parameter": PerParameter,
    "flat": Flat,
    "bucketed": Bucketed,
    "ring": ring,
    "shared-memory": SharedMemory,
}


def compare() -> list[tuple[str, str, int, bool]]:
    """One step of `net` with each reducer: what it sends, and whether it gives the mean."""
    rows = []
    for name, make in REDUCERS.items():
        torch.manual_seed(dist.get_rank())  # different weights on each rank, on purpose
        model = Net(1, 28, 10, batch_norm=False).eval().double()  # eval: without dropout
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduces,
            mock.patch.object(dist, "isend", wraps=dist.isend) as messages,
        ):
            reducer = make(model)
            torch.manual_seed(0)
            batch = torch.randn(8, 1, 28, 28).double()
            expected = torch.autograd.grad(model(batch).square().mean(), [*model.parameters()])
            shard = batch.chunk(dist.get_world_size())[dist.get_rank()]
            model(shard).square().mean().backward()
            reducer.finish()
        sizes = " ".join(str(call.args[0].nbytes) for call in all_reduces.call_args_list)
        pairs = zip(model.parameters(), expected, strict=True)
        equal = all(p.grad is not None and torch.allclose(p.grad, g, 0, 1e-12) for p, g in pairs)
        rows.append((name, sizes, messages.call_count, equal))
    return rows


def watch_backward() -> list[tuple[int, str, str, int, int]]:
    """For each bucket: when it is sent, and how many gradients are complete by then."""
    model, rows = torchvision.models.resnet18(num_classes=10), []
    names = {parameter: name for name, parameter in model.named_parameters()}
    reducer = Bucketed(model)

    def look(parameter: Parameter) -> None:  # runs after the reducer's own hook
        complete = sum(p.grad is not None for p in names)
        for number in range(len(rows), len(reducer.sent)):
            size = f"{reducer.buckets[number].flat.nbytes / 2**20:.1f}"
            rows.append((number, size, names[parameter], complete, len(names) - complete))

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(look)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    reducer.finish()
    return rows


def main() -> None:
    Parser(__doc__).parse_args()
    print("One step of `net`, in float64:\n")
    heads = ["reducer", "bytes of each all-reduce", "messages by isend", "equals the mean"]
    print(tabulate(start(2, compare)[0], heads, disable_numparse=True))
    print("\nWhen `bucketed` sends the gradients of a ResNet-18, in one backward:\n")
    heads = ["bucket", "MiB", "sent after the gradient of", "complete", "still to come"]
    print(tabulate(start(2, watch_backward)[0], heads))


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
