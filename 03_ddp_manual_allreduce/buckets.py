"""Put many small gradients side by side into a few large tensors, so that few messages are sent.

python 03_ddp_manual_allreduce/buckets.py
"""

from collections import defaultdict

import torch
import torchvision
from tabulate import tabulate
from torch import Tensor
from torch.nn import Parameter

from common.options import Parser, UsageError

FIRST, OTHERS = 2**20, 25 * 2**20  # bytes, as in torch's DDP (dist._DEFAULT_FIRST_BUCKET_BYTES)


def by_dtype(parameters: list[Parameter]) -> list[list[Parameter]]:
    """One group for each dtype, on each device."""
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.dtype, parameter.device].append(parameter)
    return list(groups.values())


def by_size(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Groups of one dtype, each closed when it reaches its size, in the order of backward.

    Backward begins at the last layer, so the groups go in reverse order (Li et al., PyTorch
    Distributed, VLDB 2020, section 3.2.3). The first one is small: it is full early.
    """
    groups: list[list[Parameter]] = []
    latest: dict[tuple, list[Parameter]] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        group = latest.get(kind)
        limit = FIRST if groups and group is groups[0] else OTHERS
        if group is None or sum(p.nbytes for p in group) >= limit:
            group = latest[kind] = []
            groups.append(group)
        group.append(parameter)
    return groups


def length(group: list[Parameter]) -> int:
    """The elements of a bucket: all gradients, and a flag for each."""
    return sum(parameter.numel() for parameter in group) + len(group)


def shaped_like(parameter: Parameter, flat: Tensor) -> Tensor:
    """A view with the shape and the strides of the parameter: fused optimizers rely on both."""
    strides = torch.empty_like(parameter).stride()  # keeps channels_last, drops gaps
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())


class Bucket:
    """The gradients of a group of parameters, in one flat tensor.

    memory: (length(group),), all zero. The flags come last and are sent with the gradients: the sum
    of a flag is zero only if no rank has a gradient for its parameter.
    """

    def __init__(self, parameters: list[Parameter], memory: Tensor) -> None:
        self.memory = memory
        *views, self.flags = memory.split([*(p.numel() for p in parameters), len(parameters)])
        self.slots = {
            p: (shaped_like(p, view), flag)
            for p, view, flag in zip(parameters, views, self.flags.unbind(), strict=True)
        }
        self.reset()

    def put(self, parameter: Parameter, world_size: int) -> None:
        """Put in this rank's share of the mean. From now on, .grad is a view into the bucket."""
        view, flag = self.slots[parameter]
        if parameter.grad is None:
            view.zero_()
            flag.zero_()
        elif parameter.grad.is_sparse:
            raise UsageError("a bucket takes no sparse gradient: try Embedding(sparse=False)")
        else:
            torch.div(parameter.grad, world_size, out=view)
            parameter.grad = view
        self.missing.discard(parameter)

    def reset(self) -> None:
        for parameter, (view, flag) in self.slots.items():
            if parameter.grad is None and flag != 0:  # another rank had a gradient for it
                parameter.grad = view
        self.flags.fill_(1)
        self.missing = set(self.slots)


def main() -> None:
    names = {p: name for name, p in torchvision.models.resnet18().named_parameters()}
    rows = [
        (f"{length(group) * 4 / 2**20:.1f}", len(group), names[group[0]], names[group[-1]])
        for group in by_size(list(names))
    ]
    print(tabulate(rows, ("MiB", "gradients", "from", "to"), showindex=True))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
