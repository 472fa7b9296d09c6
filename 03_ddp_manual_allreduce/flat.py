"""Average all gradients in one message, instead of one for each parameter.

    python 03_ddp_manual_allreduce/flat.py

Reducer is the base of all reducers. reducers.py shows how to use one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from buckets import Bucket, by_dtype, length
from common.models import Net
from common.options import Parser, UsageError
from deaths import SharedFile
from ranks import require_equal, start


class Reducer(ABC):
    """Makes sure that models and weights are equal at the start, and names a rank that died.

    Raises UsageError on every rank if their models differ or have nothing to train.
    """

    def __init__(self, model: nn.Module) -> None:
        self.world_size, self.synchronizing = dist.get_world_size(), True
        self.parameters = [p for p in model.parameters() if p.requires_grad]  # tied ones come once
        require_equal_models(model)
        self.shared = self.open_shared()
        with self.shared.naming_the_dead():
            for tensor in [*model.parameters(), *model.buffers()]:
                values = tensor.detach().contiguous()  # gloo does not skip gaps
                dist.broadcast(values, src=0)  # every rank must reach this line
                tensor.detach().copy_(values)

    @abstractmethod
    def finish(self) -> None:
        """Give every rank the mean gradients. Call it after backward, before the optimizer."""

    def open_shared(self) -> SharedFile:
        """Its locks tell which rank died."""
        return SharedFile()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward in here only adds to this rank's gradients. A later one averages the sum."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def close(self) -> None:
        """Release what the ranks share."""
        self.shared.close()


def require_equal_models(model: nn.Module) -> None:
    """Raise UsageError on every rank if parameters or buffers differ, or if none is trained."""
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
    """One all-reduce for each parameter, as in train.py's average_gradients."""

    @torch.no_grad()
    def finish(self) -> None:
        has = [p.grad is not None for p in self.parameters]
        used = torch.tensor(has, dtype=torch.uint8, device=self.parameters[0].device)
        with self.shared.naming_the_dead():
            dist.all_reduce(used, dist.ReduceOp.MAX)  # else ranks might average different tensors
            for p, anywhere in zip(self.parameters, used.tolist(), strict=True):
                if anywhere:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad)  # every rank must reach this line
                    p.grad /= self.world_size


class Flat(Reducer):
    """One all-reduce for all gradients of a dtype, after backward."""

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
        with self.shared.naming_the_dead():
            self.all_reduce()
        for bucket in self.buckets:
            bucket.reset()

    def all_reduce(self) -> None:
        for bucket in self.buckets:
            dist.all_reduce(bucket.memory)  # every rank must reach this line


def messages() -> list[list[int]]:
    """The bytes of each all-reduce in one step of `net`: one by one, then flat."""
    found = []
    for reducer_class in (PerParameter, Flat):
        model = Net(1, 28, 10, batch_norm=False)
        reducer = reducer_class(model)
        model(torch.randn(8, 1, 28, 28)).sum().backward()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduces:
            reducer.finish()
        found.append([call.args[0].nbytes for call in all_reduces.call_args_list])
        reducer.close()
    return found


def main() -> None:
    one_by_one, flat = start(2, messages)[0]
    print("bytes that each all-reduce adds up, in one step of `net`:\n")
    print(f"per parameter  {' '.join(map(str, one_by_one))}  (first: which gradients any rank has)")
    print(f"flat           {' '.join(map(str, flat))}")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
