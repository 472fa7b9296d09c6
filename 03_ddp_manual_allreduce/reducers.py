"""The ladder: five ways to average gradients, which all give the same mean.

    python 03_ddp_manual_allreduce/reducers.py

    reducer = REDUCERS["bucketed"](model)  # every rank now has rank 0's weights and buffers
    loss.backward()
    reducer.finish()                       # every rank now has the mean of all ranks' gradients
    optimizer.step()

A parameter that no rank has a gradient for stays without one. Where only some ranks have one, the
others count as zero. One reducer for a model; between backward and finish(), leave .grad alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from unittest import mock

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn import Parameter

from common.models import Net
from common.options import Parser, UsageError

from buckets import Bucket, by_dtype, by_size, length
from ranks import require_equal, start
from ring import ring_all_reduce
from shared_memory import DONE, LINE, READY, Segment


class Reducer(ABC):
    """What all of them need: equal models, an equal start, and the name of a rank that died.

    Raises UsageError on every rank if their models differ or have nothing to train.
    """

    def __init__(self, model: nn.Module) -> None:
        self.world_size, self.synchronizing = dist.get_world_size(), True
        self.parameters = [p for p in model.parameters() if p.requires_grad]  # tied ones come once
        require_equal_models(model)
        self.segment = Segment(self.shared_bytes())  # its locks tell which rank died
        with self.segment.naming_the_dead():
            for tensor in [*model.parameters(), *model.buffers()]:
                values = tensor.detach().contiguous()  # gloo would send what lies in gaps
                dist.broadcast(values, src=0)  # every rank must reach this line
                tensor.detach().copy_(values)

    @abstractmethod
    def finish(self) -> None:
        """Give every rank the mean gradients. Call it after backward, before the optimiser."""

    def shared_bytes(self) -> int:
        """How much memory the ranks share besides those locks."""
        return 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward in here adds to this rank's own gradients. A later one averages the sum."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def close(self) -> None:
        """Let go of what the ranks share."""
        self.segment.close()


def require_equal_models(model: nn.Module) -> None:
    """Raise UsageError on every rank if parameters or buffers differ, or none is trained."""
    named = [*model.named_parameters(), *model.named_buffers()]
    mine = [
        f"{name} {list(t.shape)} {t.dtype} {t.device.type}"
        + f", strides {list(t.stride())}" * (not t.is_contiguous())
        + ", trained" * t.requires_grad
        for name, t in named
    ]
    require_equal(mine)  # every rank must reach this line
    if not any(t.requires_grad for _, t in named):
        raise UsageError("the model has no parameter that is trained: nothing to average")


class PerParameter(Reducer):
    """First rung: an all-reduce for each parameter, as in train.py's average_gradients."""

    @torch.no_grad()
    def finish(self) -> None:
        has = [p.grad is not None for p in self.parameters]
        used = torch.tensor(has, dtype=torch.uint8, device=self.parameters[0].device)
        with self.segment.naming_the_dead():
            dist.all_reduce(used, dist.ReduceOp.MAX)  # else ranks might average different tensors
            for p, anywhere in zip(self.parameters, used.tolist(), strict=True):
                if anywhere:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad)  # every rank must reach this line
                    p.grad /= self.world_size


class Flat(Reducer):
    """Second rung: one all-reduce for all gradients of a dtype, after backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.buckets = self.make_buckets(self.plan())

    def plan(self) -> list[list[Parameter]]:
        """Which parameters share a bucket."""
        return by_dtype(self.parameters)

    def make_buckets(self, plan: list[list[Parameter]]) -> list[Bucket]:
        return [Bucket(group, group[0].new_zeros(length(group))) for group in plan]

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in self.buckets:
            for parameter in list(bucket.missing):
                bucket.put(parameter, self.world_size)
        with self.segment.naming_the_dead():
            self.all_reduce()
        for bucket in self.buckets:
            bucket.reset()

    def all_reduce(self) -> None:
        for bucket in self.buckets:
            dist.all_reduce(bucket.memory)  # every rank must reach this line


class Bucketed(Flat):
    """Third rung: several buckets, each sent as soon as it is full, while backward goes on.

    As DDP does it: Li et al., PyTorch Distributed, VLDB 2020, section 3.2.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.slots}
        self.sent: list[dist.Work] = []
        # Not a hook on the gradient itself: that one would run before the gradient is added up.
        self.hooks = [p.register_post_accumulate_grad_hook(self.take) for p in self.parameters]

    def plan(self) -> list[list[Parameter]]:
        return by_size(self.parameters)

    @torch.no_grad()
    def take(self, parameter: Parameter) -> None:
        """Backward calls it when the gradient of this parameter is complete."""
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.missing:
            raise RuntimeError(
                "a second backward before finish(): call finish() after each, or put all but the "
                "last into no_sync()"
            )
        if not self.synchronizing:
            return
        bucket.put(parameter, self.world_size)
        if not bucket.missing:
            with self.segment.naming_the_dead():
                self.send_full_buckets()

    def send_full_buckets(self) -> None:
        for bucket in self.buckets[len(self.sent) :]:
            if bucket.missing:  # those after it wait: all ranks must send in the same order
                break
            self.sent.append(dist.all_reduce(bucket.memory, async_op=True))

    def all_reduce(self) -> None:
        self.send_full_buckets()
        for work in self.sent:
            work.wait()
        self.sent = []

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        super().close()


class Ring(Flat):
    """Fourth rung: flat again, but the all-reduce is ours too."""

    def __init__(self, model: nn.Module) -> None:
        if dist.get_backend() == "nccl":
            raise UsageError("the ring sends from main memory, nccl from GPUs only: try gloo")
        super().__init__(model)

    def all_reduce(self) -> None:
        for bucket in self.buckets:
            ring_all_reduce(bucket.memory)


class SharedMemory(Bucketed):
    """Fifth rung, for one machine: each rank adds up its slice of all ranks' gradients.

    The gradients lie in memory that all ranks see: nothing is sent. They are copied there during
    backward, while they are still in the processor's cache.
    """

    plan = Flat.plan  # no need to send early where nothing is sent
    PIECE = 2**16  # elements that are added up at a time: what is read and written stays in cache

    def __init__(self, model: nn.Module) -> None:
        if any(p.device.type != "cpu" for p in model.parameters()):
            raise UsageError("shared-memory needs gradients on the CPU: try bucketed")
        super().__init__(model)

    def make_buckets(self, plan: list[list[Parameter]]) -> list[Bucket]:
        rank = dist.get_rank()
        self.slices, self.steps, buckets, offset = [], 0, [], 0
        for group in plan:
            shape = (self.world_size, row_bytes(group) // group[0].element_size())
            rows = self.segment.tensor(group[0].dtype, shape, offset)  # a row for each rank
            self.slices += rows.tensor_split(self.world_size, dim=1)[rank].split(self.PIECE, dim=1)
            buckets.append(Bucket(group, rows[rank, : length(group)]))
            offset += row_bytes(group) * self.world_size
        return buckets

    def shared_bytes(self) -> int:
        return sum(row_bytes(group) for group in self.plan()) * self.world_size

    def send_full_buckets(self) -> None:
        """Nothing is sent."""

    def all_reduce(self) -> None:
        self.steps += 1
        self.segment.post(READY, self.steps)
        self.segment.wait(READY, self.steps)  # all gradients are there
        for rows in self.slices:  # (world size, elements)
            rows[:] = reduce(torch.add, rows.unbind())
        self.segment.post(DONE, self.steps)
        self.segment.wait(
            DONE, self.steps
        )  # all slices are summed: now each may change its own row


def row_bytes(group: list[Parameter]) -> int:
    """The bytes of a bucket, rounded up to whole cache lines."""
    return -(-length(group) * group[0].element_size() // LINE) * LINE


REDUCERS: dict[str, type[Reducer]] = {
    "per-parameter": PerParameter,
    "flat": Flat,
    "bucketed": Bucketed,
    "ring": Ring,
    "shared-memory": SharedMemory,
}


def compare() -> list[tuple[str, int, int, bool]]:
    """One step of `net` with each: what it sends, and whether it finds the mean."""
    rows = []
    for name, reducer_class in REDUCERS.items():
        torch.manual_seed(dist.get_rank())  # other weights on each rank, on purpose
        model = Net(1, 28, 10, batch_norm=False).eval().double()  # eval: without dropout
        reducer = reducer_class(model)
        torch.manual_seed(0)
        batch = torch.randn(8, 1, 28, 28).double()
        expected = torch.autograd.grad(model(batch).square().mean(), reducer.parameters)
        shard = batch.chunk(dist.get_world_size())[dist.get_rank()]
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduces,
            mock.patch.object(dist, "isend", wraps=dist.isend) as messages,
        ):
            model(shard).square().mean().backward()
            reducer.finish()
        pairs = zip(reducer.parameters, expected, strict=True)
        equal = all(p.grad is not None and torch.allclose(p.grad, g, 0, 1e-12) for p, g in pairs)
        rows.append((name, all_reduces.call_count, messages.call_count, equal))
        reducer.close()
    return rows


def main() -> None:
    headers = ("reducer", "all-reduces a step", "messages by isend", "equals the whole batch's")
    print(tabulate(start(2, compare)[0], headers))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
