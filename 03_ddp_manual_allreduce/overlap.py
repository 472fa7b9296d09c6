"""Send gradients while backward computes others, as DistributedDataParallel does.

    python 03_ddp_manual_allreduce/overlap.py

Gradients are collected in several buckets (buckets.py). A hook runs when a gradient is complete.
A bucket is sent as soon as it is full: the network works while the processor does.
See Li et al., PyTorch Distributed, VLDB 2020, section 3.2.
"""

import torch
import torch.distributed as dist
import torchvision
from tabulate import tabulate
from torch import nn
from torch.nn import Parameter

from buckets import by_size
from common.options import Parser
from flat import Flat
from ranks import start


class Bucketed(Flat):
    """Several buckets, each sent as soon as it is full, while backward continues."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.slots}
        self.sent: list[dist.Work] = []
        # A hook on the gradient itself would run before the gradient is added to .grad.
        self.hooks = [p.register_post_accumulate_grad_hook(self.take) for p in self.parameters]

    def plan(self) -> list[list[Parameter]]:
        return by_size(self.parameters)

    @torch.no_grad()
    def take(self, parameter: Parameter) -> None:
        """Called by backward when the gradient of this parameter is complete."""
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
            with self.shared.naming_the_dead():
                self.send_full_buckets()

    def send_full_buckets(self) -> None:
        for bucket in self.buckets[len(self.sent) :]:
            if bucket.missing:  # later buckets wait: all ranks must send in the same order
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


def watch_backward() -> list[tuple[int, str, str, int, int]]:
    """For each bucket: when it was sent, and how many gradients were complete by then."""
    model = torchvision.models.resnet18(num_classes=10)
    names = {parameter: name for name, parameter in model.named_parameters()}
    reducer, rows = Bucketed(model), []

    def look(parameter: Parameter) -> None:  # runs after the reducer's own hook
        complete = sum(p.grad is not None for p in reducer.parameters)
        for number in range(len(rows), len(reducer.sent)):
            size = f"{reducer.buckets[number].memory.nbytes / 2**20:.1f}"
            rows.append((number, size, names[parameter], complete, len(names) - complete))

    for parameter in reducer.parameters:
        parameter.register_post_accumulate_grad_hook(look)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    reducer.finish()
    return rows


def main() -> None:
    print("When the buckets of a ResNet-18 are sent, in one backward:\n")
    headers = ("bucket", "MiB", "sent after the gradient of", "complete", "still to come")
    print(tabulate(start(2, watch_backward)[0], headers))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
