"""What every reducer needs: the same start on all ranks, and which gradients there are to average.

The reducers themselves stand in reducers.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from common.options import UsageError


def require_equal(descriptions: list[str]) -> None:
    """Raise UsageError on every rank if the ranks do not give the same descriptions."""
    all_ranks = [descriptions] * dist.get_world_size()
    dist.all_gather_object(all_ranks, descriptions)  # every rank must reach this line
    expected = [*all_ranks[0], "nothing"]
    for rank, given in enumerate(all_ranks):
        for here, there in zip([*given, "nothing"], expected, strict=False):
            if here != there:
                raise UsageError(
                    f"rank {rank} has {here} where rank 0 has {there}: make them the same on "
                    "every rank"
                )


def broadcast_model(model: nn.Module) -> list[Parameter]:
    """Give every rank the weights and buffers of rank 0; returns the parameters that are trained.

    Raises UsageError on every rank if their models differ or have nothing that can be averaged.
    """
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    descriptions = []
    for name, tensor in named_tensors:
        trained = ", trained" if tensor.requires_grad else ""
        descriptions.append(f"{name} {list(tensor.shape)} {tensor.dtype}{trained}")
    require_equal(descriptions)

    parameters = [p for p in model.parameters() if p.requires_grad]  # tied parameters come once
    if not parameters:
        raise UsageError("the model has no parameter that is trained: nothing to average")
    if any(getattr(module, "sparse", False) for module in model.modules()):
        raise UsageError("a reducer takes no sparse gradients: try Embedding(sparse=False)")

    for _, tensor in named_tensors:
        values = tensor.detach().contiguous()  # gloo would read across the gaps of a view
        dist.broadcast(values, src=0)
        tensor.detach().copy_(values)
    return parameters


def fill_missing_gradients(parameters: list[Parameter]) -> dict[Parameter, Tensor]:
    """A collective: give this rank a gradient of zeros for what only other ranks have used.

    Returns the gradient of each parameter that some rank has used.

    Without it, a rank that skipped a parameter would send its next gradient, and the other ranks
    would add it to the wrong one. It costs one small all-reduce, which DDP sends for the same
    reason if find_unused_parameters=True.
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


def write_divided_gradient(parameter: Parameter, view: Tensor) -> None:
    """Write this rank's gradient, divided by the number of ranks; zeros if it has none."""
    if parameter.grad is None:
        view.zero_()
    else:
        torch.div(parameter.grad, dist.get_world_size(), out=view)
