"""Watch every operation of torch: which one writes to a parameter, and which one draws?

A dispatch mode of torch sees all that autograd sees, and also writes to `p.data` or by
`torch._foreach_*`. A step is a change of parameters, whoever makes it: a script without an
optimizer of torch is watched by its first write to a parameter after a batch.
"""

from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prove.watch.draws import is_draw
from prove.watch.rank_run import RankRun


def address_of(tensor: Tensor) -> int:
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.untyped_storage().data_ptr()


class OptimizerByHand:
    """Stands in for a missing optimizer, and holds the parameters that the script changes."""

    def __init__(self) -> None:
        self.param_groups: list[dict] = [{"params": []}]  # without a learning rate
        self.addresses: list[int] = []  # memory addresses of its parameters

    def hold(self, parameter: Tensor) -> None:
        if not any(parameter is known for known in self.param_groups[0]["params"]):
            self.param_groups[0]["params"].append(parameter)
            self.addresses.append(address_of(parameter))

    def holds(self, tensor: Any) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) and not hasattr(tensor, "to_local"):
            return False
        has_memory = not is_functorch_wrapped_tensor(tensor)  # torch.func wraps without memory
        return has_memory and address_of(tensor) in self.addresses

    def exchanged(self) -> bool:
        """Has a parameter moved in memory? `p.data = new` moves it without a write."""
        before, parameters = self.addresses, self.param_groups[0]["params"]
        self.addresses = [address_of(parameter) for parameter in parameters]
        return self.addresses != before


class OperationWatcher(TorchDispatchMode):
    def __init__(self, run: RankRun) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws, steps = self.run.draws, self.run.models.steps
        in_step = draws.active or draws.of_model
        if in_step and steps.by_hand.addresses and args and function._schema.is_mutable:
            written = args[0] if isinstance(args[0], list | tuple) else args[:1]
            if any(steps.by_hand.holds(tensor) for tensor in written):
                steps.begin_step_by_hand()
        if not draws.active:
            if kwargs.get("generator") is not None and is_draw(function):
                draws.note_between()
            return function(*args, **kwargs)
        if not is_draw(function):
            return function(*args, **kwargs)
        return draws.record_or_replay_operation(function, args, kwargs)


def install(run: RankRun) -> None:
    OperationWatcher(run).__enter__()
