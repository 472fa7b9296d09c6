"""Average the gradients of all ranks, in four ways that give the same mean.

    python 03_ddp_manual_allreduce/reducers.py

Read them in this order. PerParameter sends a message for each parameter, as train.py does. Flat
sends one message for all of them. Bucketed sends several, each as soon as backward has filled it,
as DistributedDataParallel does. SharedMemory sends no gradient at all. In a training loop:

    reducer = Bucketed(model)  # every rank now has rank 0's weights and buffers
    loss.backward()            # Bucketed sends in here
    reducer.finish()           # every rank now has the mean of all ranks' gradients
    optimizer.step()

If only some ranks have a gradient for a parameter, the others count as zero. If no rank has one,
the parameter stays without. Page: reducers.md
"""

import math
import os
import tempfile
from collections.abc import Callable
from functools import reduce
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchvision
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import Parameter

from common.models import Net
from common.options import Parser, UsageError, exit_on_usage_error
from ranks import require_equal, start
from ring import ring_all_reduce


def same_start(model: nn.Module) -> list[Parameter]:
    """Give every rank the weights and buffers of rank 0; returns the parameters that are trained.

    Raises UsageError on every rank if their models differ or have nothing that can be averaged.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    require_equal(
        [f"{n} {list(t.shape)} {t.dtype}{', trained' * t.requires_grad}" for n, t in named]
    )
    trained = [p for p in model.parameters() if p.requires_grad]  # tied parameters come once
    if not trained:
        raise UsageError("the model has no parameter that is trained: nothing to average")
    if any(getattr(module, "sparse", False) for module in model.modules()):
        raise UsageError("a reducer takes no sparse gradients: try Embedding(sparse=False)")
    for _, tensor in named:
        values = tensor.detach().contiguous()  # gloo would read across the gaps of a view
        dist.broadcast(values, src=0)
        tensor.detach().copy_(values)
    return trained


class PerParameter:
    """One all-reduce for each parameter, after backward."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = same_start(model)

    @torch.no_grad()
    def finish(self) -> None:
        used = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8)
        used = used.to(self.parameters[0].device)
        # A rank that skipped a parameter would add its next gradient to this one of the others.
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for parameter, anywhere in zip(self.parameters, used.tolist(), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class Flat:
    """One all-reduce for all gradients together, after backward.

    Gradients of several dtypes travel in the widest of them.
    """

    def __init__(self, model: nn.Module, all_reduce: Callable | None = None) -> None:
        self.parameters, self.all_reduce = same_start(model), all_reduce or dist.all_reduce

    @torch.no_grad()
    def finish(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        used = gradients[0].new_tensor([p.grad is not None for p in self.parameters])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), used])
        flat /= dist.get_world_size()
        self.all_reduce(flat)
        *means, used = flat.split([*(p.numel() for p in self.parameters), len(used)])
        for parameter, gradient, mean, anywhere in zip(
            self.parameters, gradients, means, used.tolist(), strict=True
        ):
            if anywhere:
                parameter.grad = gradient.copy_(mean.view_as(gradient))


FIRST, OTHERS = 2**20, 25 * 2**20  # bytes, as in torch's DDP (dist._DEFAULT_FIRST_BUCKET_BYTES)


def group(parameters: list[Parameter], first: float, others: float) -> list[list[Parameter]]:
    """Groups of one dtype and device, each closed when it has reached so many bytes.

    Backward begins at the last layer, so the groups go in reverse order (Li et al., PyTorch
    Distributed, VLDB 2020, section 3.2.3). The first one is small: it is full early.
    """
    groups: list[list[Parameter]] = []
    latest: dict[tuple, list[Parameter]] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        members = latest.get(kind)
        limit = first if groups and members is groups[0] else others
        if members is None or sum(p.nbytes for p in members) >= limit:
            members = latest[kind] = []
            groups.append(members)
        members.append(parameter)
    return groups


def elements(parameters: list[Parameter]) -> int:
    """The length of a bucket: all gradients, and a flag for each."""
    return sum(parameter.numel() for parameter in parameters) + len(parameters)


class Bucket:
    """The gradients of some parameters, in one flat tensor.

    memory: (elements(parameters),). The flags lie at its end and travel along: a flag is 1 if this
    rank has a gradient, so the sum of the ranks' flags is 0 only if none of them has one.
    """

    def __init__(self, parameters: list[Parameter], memory: Tensor) -> None:
        self.memory = memory
        *views, self.flags = memory.split([*(p.numel() for p in parameters), len(parameters)])
        self.slots = {
            parameter: (view.view_as(parameter), flag)
            for parameter, view, flag in zip(parameters, views, self.flags.unbind(), strict=True)
        }
        self.missing = set(parameters)

    def put(self, parameter: Parameter) -> None:
        """Copy this rank's share of the mean into the bucket."""
        view, flag = self.slots[parameter]
        if parameter.grad is None:
            view.zero_()
            flag.zero_()
        else:
            torch.div(parameter.grad, dist.get_world_size(), out=view)
            flag.fill_(1)
        self.missing.discard(parameter)

    def put_missing(self) -> None:
        for parameter in list(self.missing):
            self.put(parameter)

    def take_out(self) -> None:
        """Copy the means back to the gradients."""
        for (parameter, (view, _)), anywhere in zip(
            self.slots.items(), self.flags.tolist(), strict=True
        ):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)
        self.missing = set(self.slots)


class Bucketed:
    """Several buckets, each sent as soon as it is full, while backward goes on.

    To accumulate, set `synchronize` to False before all backwards but the last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.synchronize, self.parameters = True, same_start(model)
        groups = group(self.parameters, FIRST, OTHERS)
        self.buckets = [Bucket(each, each[0].new_zeros(elements(each))) for each in groups]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.slots}
        self.sent: list[Any] = []
        # A hook on the gradient itself would run before the gradient is added to .grad.
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    @torch.no_grad()
    def gradient_is_ready(self, parameter: Parameter) -> None:
        if self.synchronize:
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
            self.sent.append(dist.all_reduce(bucket.memory, async_op=True))

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in self.buckets:
            bucket.put_missing()
        self.send_full_buckets()
        for bucket, work in zip(self.buckets, self.sent, strict=True):
            work.wait()
            bucket.take_out()
        self.sent = []


def share_memory(size: int) -> Tensor:
    """The same `size` bytes on every rank, all zero. UsageError if a rank cannot see them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    file, places = -1, [""]
    if rank == 0 and hasattr(os, "memfd_create"):  # Linux, where /dev/shm may be small
        file = os.memfd_create("gradients")
        places = [f"/proc/{os.getpid()}/fd/{file}"]
    elif rank == 0:
        file, places[0] = tempfile.mkstemp()
    dist.broadcast_object_list(places, src=0)
    memory = torch.from_file(places[0], shared=True, size=size + ranks, dtype=torch.uint8)
    memory[size + rank] = 1
    dist.barrier()
    if rank == 0:
        os.close(file)  # the memory lives as long as a rank maps it
        if not hasattr(os, "memfd_create"):
            os.unlink(places[0])
    if not memory[size:].all():
        raise UsageError("the ranks do not see the same memory: run all on one machine")
    return memory[:size]


class SharedMemory:
    """For CPUs of one machine: each rank adds up its slice of all ranks' gradients."""

    PIECE = 2**16  # elements that are added up at a time: they stay in the processor's cache

    def __init__(self, model: nn.Module) -> None:
        if any(p.device.type != "cpu" for p in model.parameters()):
            raise UsageError("shared-memory needs gradients on the CPU: try bucketed")
        self.buckets, self.slices = list[Bucket](), list[Tensor]()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for members in group(same_start(model), math.inf, math.inf):  # one for each dtype
            shape, dtype = (ranks, elements(members)), members[0].dtype
            rows = share_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            self.buckets.append(Bucket(members, rows[rank]))
            self.slices += rows.tensor_split(ranks, dim=1)[rank].split(self.PIECE, dim=1)

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in self.buckets:
            bucket.put_missing()
        dist.barrier()  # all gradients are there
        for rows in self.slices:  # (ranks, elements)
            rows[:] = reduce(torch.add, rows.unbind())
        dist.barrier()  # all slices are summed
        for bucket in self.buckets:
            bucket.take_out()


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
            size = f"{reducer.buckets[number].memory.nbytes / 2**20:.1f}"
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
    with exit_on_usage_error():
        main()
