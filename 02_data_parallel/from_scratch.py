"""DataParallel by hand: replicate, scatter, apply in threads, gather; autograd does the way back.

    python 02_data_parallel/from_scratch.py

`torch.nn.DataParallel` needs two GPUs. This one takes any list of devices, and a device may stand
in it more than once: each entry is one replica, with its own copy of the parameters and its own
part of the batch.
"""

import copy
from threading import Thread

import torch
from torch import Tensor, nn
from torch.func import functional_call

Tensors = dict[str, Tensor]


def scatter(batch: Tensor, devices: list[torch.device]) -> list[Tensor]:
    """Cut the batch along its first dimension, one part for each device: 30 over 3
    gives 3 × 10.

    Fewer samples than devices give fewer parts, and the last replicas have nothing to do.
    """
    parts = batch.chunk(len(devices))
    return [part.to(device) for part, device in zip(parts, devices, strict=False)]


def replicate(module: nn.Module, devices: list[torch.device]) -> list[Tensors]:
    """Copy parameters and buffers to each device.

    A copy of a parameter is a step of autograd like any other: on the way back, the gradients of
    all copies are summed into the one parameter of the module. Replica 0 works on the module's own
    buffers, so that its running statistics stay; those of the other replicas are lost.
    """
    replicas = []
    for index, device in enumerate(devices):
        tensors = {name: p.to(device, copy=True) for name, p in module.named_parameters()}
        for name, buffer in module.named_buffers():
            tensors[name] = buffer if index == 0 else buffer.to(device, copy=True)
        replicas.append(tensors)
    return replicas


def apply(shells: list[nn.Module], replicas: list[Tensors], parts: list[Tensor]) -> list[Tensor]:
    """Run each replica on its part of the batch, each in a thread of its own."""
    outputs: dict[int, Tensor] = {}
    errors: list[Exception] = []
    grad_enabled = torch.is_grad_enabled()  # each thread has its own such switch

    def work(index: int) -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                outputs[index] = functional_call(shells[index], replicas[index], (parts[index],))
        except Exception as error:  # a thread would only print it
            errors.append(error)

    threads = [Thread(target=work, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [outputs[index] for index in range(len(parts))]


def gather(outputs: list[Tensor], device: torch.device) -> Tensor:
    """Put the outputs together on the main device, in the order of the batch."""
    return torch.cat([output.to(device) for output in outputs])


class DataParallel(nn.Module):
    """A module whose forward runs on replicas, as torch.nn.DataParallel's does.

    The module itself, `.module`, must be on devices[0], the main device.
    """

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.module, self.devices = module, devices
        # A shell is the module without weights. functional_call puts a replica's weights into it
        # while it runs, so each thread needs a shell of its own.
        self.shells = [copy.deepcopy(module).to("meta") for _ in devices]

    def forward(self, batch: Tensor) -> Tensor:
        parts = scatter(batch, self.devices)
        replicas = replicate(self.module, self.devices[: len(parts)])
        for shell in self.shells:
            shell.train(self.module.training)
        return gather(apply(self.shells, replicas, parts), self.devices[0])


def main() -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 2).double()
    devices = [torch.device("cpu")] * 3
    batch, targets = torch.randn(30, 5).double(), torch.randn(30, 2).double()
    gradients = {}
    for name, model in {"one module": module, "3 replicas": DataParallel(module, devices)}.items():
        loss = nn.functional.mse_loss(model(batch), targets)
        (gradients[name],) = torch.autograd.grad(loss, [module.weight])

    parts = scatter(batch, devices)
    outputs = apply([copy.deepcopy(module) for _ in parts], replicate(module, devices), parts)
    print(f"scatter   {tuple(batch.shape)} -> {[tuple(part.shape) for part in parts]}")
    print(f"apply     {[tuple(output.shape) for output in outputs]}")
    print(f"gather    {tuple(gather(outputs, devices[0]).shape)}")
    difference = (gradients["one module"] - gradients["3 replicas"]).abs().max().item()
    print(f"gradient  largest difference from one module on the whole batch: {difference:.0e}")


if __name__ == "__main__":
    main()
