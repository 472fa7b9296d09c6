"""DataParallel by hand: the seven steps of a training step as seven functions.

    python 02_data_parallel/from_scratch.py

It leaves out `dim`, `output_device` and the caller's CUDA streams. Virtual replicas draw random
numbers from one generator, in no fixed order: a run with dropout cannot be repeated exactly.
"""

import copy
from collections.abc import Callable
from itertools import chain
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from common.options import Parser

Devices = list[torch.device]  # one per replica, perhaps all the same; the first is the main one
Call = tuple[tuple, dict[str, Any]]  # positional and keyword arguments of a forward


def to_main_device(module: nn.Module, devices: Devices) -> nn.Module:
    """Step 1: the module lies on the main device."""
    return module.to(devices[0])


def scatter(devices: Devices, *args: Any, **kwargs: Any) -> list[Call]:
    """Step 2: cut every tensor along its first dimension: 30 over 3 gives 3 × 10.

    Fewer samples than devices give fewer parts. Anything but a tensor goes to every replica.
    """
    leaves, form = tree_flatten((args, kwargs))  # the tensors inside tuples, lists and dicts too

    def cut(leaf: Any) -> list:
        if not isinstance(leaf, Tensor):
            return [leaf] * len(devices)
        chunks = leaf.chunk(len(devices))
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]

    parts = zip(*map(cut, leaves), strict=False)
    return [tree_unflatten(part, form) for part in parts] or [(args, kwargs)]  # no tensor: one part


def replicate(module: nn.Module, devices: Devices) -> list[nn.Module]:
    """Step 3: a replica for each device. Replica 0 is the module; torch's only shares its tensors.

    Autograd records a copy like any other operation. In backward, the gradients of all copies are
    summed into the one parameter. What a forward changes in a copy is lost with the copy.
    """
    replicas = [module]
    for device in devices[1:]:
        tensors = chain(module.parameters(), module.buffers())  # a tied weight comes once
        copies = {id(tensor): tensor.to(device, copy=True) for tensor in tensors}
        replicas.append(copy.deepcopy(module, copies))  # skips what `copies` holds
    return replicas


def apply(replicas: list[nn.Module], parts: list[Call], devices: Devices) -> list[Any]:
    """Step 4: run each replica on its part of the batch, each in a thread of its own."""
    outputs, errors = dict[int, Any](), dict[int, Exception]()
    # A new thread starts with the defaults of these switches, not with the caller's.
    grad_enabled, kind = torch.is_grad_enabled(), devices[0].type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def work(index: int) -> None:
        try:
            if kind == "cuda":
                torch.cuda.set_device(devices[index])  # for this thread only
            with torch.set_grad_enabled(grad_enabled), torch.autocast(kind, dtype, enabled):
                outputs[index] = replicas[index](*parts[index][0], **parts[index][1])
        except Exception as error:  # the thread itself would only print the error
            errors[index] = error

    threads = [Thread(target=work, args=(i,), name=f"replica {i}") for i in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [outputs[index] for index in range(len(parts))]


def gather(outputs: list[Any], devices: Devices) -> Any:
    """Step 5: join the outputs, or what they hold, on the main device in the order of the batch.

    None stays None, as in torch's gather: a model may leave out its loss.
    """

    def join(*parts: Any) -> Tensor | None:
        if parts[0] is None:
            return None
        return torch.cat([torch.atleast_1d(part.to(devices[0])) for part in parts])

    return tree_map(join, *outputs)


def loss_on_main_device(criterion: Callable, outputs: Any, targets: Tensor) -> Tensor:
    """Step 6: the loss of the whole batch."""
    return criterion(outputs, targets)


def backward_and_update(loss: Tensor, optimizer: Optimizer) -> None:
    """Step 7: autograd takes the same way back, and the optimizer updates the module."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_step(
    module: nn.Module, optimizer: Optimizer, criterion: Callable, batch: tuple, devices: Devices
) -> Tensor:
    """The seven steps in order. batch: inputs and targets. Returns the loss."""
    to_main_device(module, devices)
    parts = scatter(devices, batch[0])
    replicas = replicate(module, devices[: len(parts)])
    outputs = gather(apply(replicas, parts, devices), devices)
    loss = loss_on_main_device(criterion, outputs, batch[1])
    backward_and_update(loss, optimizer)
    return loss.detach()


class DataParallel(nn.Module):
    """A module whose forward takes steps 2 to 5, as torch.nn.DataParallel's does."""

    def __init__(self, module: nn.Module, devices: Devices) -> None:
        super().__init__()
        self.module, self.devices = to_main_device(module, devices), devices

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = scatter(self.devices, *args, **kwargs)
        replicas = replicate(self.module, self.devices[: len(parts)])  # no copy for idle devices
        return gather(apply(replicas, parts, self.devices), self.devices)


def main() -> None:
    torch.manual_seed(0)
    module, devices = nn.Linear(5, 2).double(), [torch.device("cpu")] * 3
    batch = torch.randn(30, 5).double(), torch.randn(30, 2).double()
    parts = scatter(devices, batch[0])
    outputs = apply(replicate(module, devices), parts, devices)
    print(f"scatter  (30, 5) -> {[tuple(args[0].shape) for args, _ in parts]}")
    print(f"apply    {[tuple(output.shape) for output in outputs]}")
    print(f"gather   {tuple(gather(outputs, devices).shape)}")
    alone = copy.deepcopy(module)
    for model, used in ((alone, devices[:1]), (module, devices)):
        loss = train_step(model, SGD(model.parameters(), lr=0.1), F.mse_loss, batch, used)
        print(f"step     on {len(used)}, loss {loss:.12f}")
    print(f"weights  differ by at most {(alone.weight - module.weight).abs().max():.0e}")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
