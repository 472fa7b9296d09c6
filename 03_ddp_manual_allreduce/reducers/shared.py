"""What every reducer needs: the same start on all ranks, and which gradients there are to average.

The reducers themselves stand in reducers.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter


def broadcast_model(model: nn.Module) -> list[Parameter]:
    """Give every rank the weights and buffers of rank 0; returns the parameters that are trained.

    The models must be equal: every rank must reach this line with the same shapes.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach().contiguous()  # gloo would read across the gaps of a view
        dist.broadcast(values, src=0)
        tensor.detach().copy_(values)
    return [p for p in model.parameters() if p.requires_grad]  # tied parameters come once


def fill_missing_gradients(parameters: list[Parameter]) -> dict[Parameter, Tensor]:
    """A collective: give this rank a gradient of zeros for what only other ranks have used.

    Returns the gradient of each parameter that some rank has used.

    Without it, a rank that skipped a parameter would send its next gradient, and the other ranks
    would add it to the wrong one. It costs one small all-reduce, which DDP sends for the same
    reason if find_unused_parameters=True. The other reducers put these numbers into the message
    that they send anyway.
    """
    has_gradient = [parameter.grad is not None for parameter in parameters]
    used = torch.tensor(has_gradient, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    gradients = {}
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients[parameter] = parameter.grad
    return gradients


def views_of(flat: Tensor, parameters: list[Parameter]) -> dict[Parameter, Tensor]:
    """Cut a tensor of one dimension into a view for each parameter, in the parameter's shape."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    return {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}


def write_divided_gradient(parameter: Parameter, view: Tensor, is_used: Tensor) -> None:
    """Write this rank's gradient, divided by the number of ranks, and that it has one."""
    if parameter.grad is None:
        view.zero_()
        is_used.zero_()
    else:
        torch.div(parameter.grad, dist.get_world_size(), out=view)
        is_used.fill_(1)


def set_gradients(means: dict[Parameter, Tensor], is_used: Tensor) -> None:
    """Give each parameter its mean if some rank has used it: then its number is not 0."""
    for (parameter, mean), used in zip(means.items(), is_used.tolist(), strict=True):
        if used:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(mean)
