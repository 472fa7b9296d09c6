"""Checkpoints of a sharded run: the full state on rank 0, in the format that all stages share.

So any number of ranks can resume such a file, and so can a script that shards nothing. These two
classes stand for the model and the optimizer: the names and shapes are those of a plain run.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from fsdp import FSDP
from shards import Shards
from zero import ShardedOptimizer

State = dict[str, Any]


class Collected:
    """What collect() has put together on rank 0, under the name that save_checkpoint asks for."""

    def __init__(self) -> None:
        self.collected = State()

    def state_dict(self) -> State:
        return self.collected


def groups_with(groups: list[State], name_of: Any) -> list[State]:
    """Return an optimizer's groups, in which `name_of` names the parameters."""
    return [{**group, "params": [name_of[p] for p in group["params"]]} for group in groups]


class FullModelState(Collected):
    """The state_dict of the plain model: call collect() on every rank, then rank 0 has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def collect(self) -> None:
        """Put the parameters together on rank 0. Every rank must call it."""
        if not isinstance(self.model, FSDP):
            self.collected = self.model.state_dict()
            return
        full_tensor: dict[Parameter, Tensor] = {}  # each part's full tensor
        for layer in self.model.layers:
            tensors = layer.shards.gather([part.detach() for part in layer.owned])
            full_tensor |= zip(layer.owned, tensors, strict=False)  # none, except on rank 0
        plain = self.model.model.state_dict(keep_vars=True)
        self.collected = {name: full_tensor.get(t, t).detach() for name, t in plain.items()}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Take this rank's parts of the sharded tensors, and all of the others."""
        if not isinstance(self.model, FSDP):
            self.model.load_state_dict(state)
            return
        plain = self.model.model.state_dict(keep_vars=True)
        if different := plain.keys() ^ state.keys():
            raise KeyError(f"another model: {min(different)} is in one of them only")
        names: dict[Tensor, str] = {}
        for name, tensor in plain.items():
            names.setdefault(tensor, name)
        for layer in self.model.layers:
            tensors = [state[names.pop(part)] for part in layer.owned]
            if [tensor.shape for tensor in tensors] != layer.shards.shapes:
                raise RuntimeError(f"another model: {layer.name} has other shapes")
            for part, loaded in zip(layer.owned, layer.shards.cut(tensors), strict=True):
                part.copy_(loaded)
        for tensor, name in names.items():
            tensor.copy_(state[name])


def is_elementwise(value: Any) -> bool:
    """Tell whether an optimizer keeps this for each element of a parameter, unlike AdamW's step."""
    return isinstance(value, Tensor) and value.ndim > 0


class FullOptimizerState(Collected):
    """The state_dict of the plain optimizer, and where the parts of its state lie.

    model: what is trained. optimizer: a ShardedOptimizer, or one of an FSDP model's parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        self.is_sharded = isinstance(model, FSDP) or isinstance(optimizer, ShardedOptimizer)
        self.layers = model.layers if isinstance(model, FSDP) else []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups; an optimizer that loads its state makes new ones, so ask each time."""
        return self.optimizer.param_groups

    def numbers(self) -> dict[Parameter, int]:
        """Return the number of each parameter in a plain optimizer's state_dict."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {parameter: number for number, parameter in enumerate(parameters)}

    def shards(self) -> Iterator[tuple[Shards, list[Parameter], list[int]]]:
        """Yield, for each bucket or layer, the parts that this rank owns, and their numbers."""
        number = self.numbers()
        for layer in self.layers:
            yield layer.shards, layer.owned, [number[part] for part in layer.owned]
        if isinstance(self.optimizer, ShardedOptimizer):
            for bucket in self.optimizer.buckets:
                yield bucket, bucket.owned, [number[p] for p in bucket.parameters]

    def collect(self) -> None:
        """Put the state of all parts together on rank 0. Every rank must call it."""
        if not self.is_sharded:
            self.collected = self.optimizer.state_dict()
            return
        number = self.numbers()  # what FSDP does not shard has its state under its own number
        state = {n: dict(self.inner.state[p]) for p, n in number.items() if p in self.inner.state}
        for shards, parts, numbers in self.shards():
            rows = [dict(self.inner.state[part]) for part in parts]
            for key in [key for key, value in rows[0].items() if is_elementwise(value)]:
                tensors = shards.gather([row[key] for row in rows])
                for row, tensor in zip(rows, tensors, strict=False):  # none, except on rank 0
                    row[key] = tensor
            state |= {n: row for n, row in zip(numbers, rows, strict=True) if row}
        groups = groups_with(self.param_groups, number)
        self.collected = {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, saved: State) -> None:
        """Take this rank's parts of the full state."""
        if not self.is_sharded:
            self.optimizer.load_state_dict(saved)
            return
        for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
            missing_options = group.keys() - saved_group.keys()
            if missing_options or len(group["params"]) != len(saved_group["params"]):
                raise KeyError("it is of another optimizer or of another model")
            group.update({key: saved_group[key] for key in saved_group if key != "params"})
        rows: dict[int, State] = saved["state"]
        # The momentum of a scalar parameter looks like AdamW's step, so all parameters are asked.
        elementwise = {k for row in rows.values() for k, v in row.items() if is_elementwise(v)}
        self.inner.state.clear()
        trained = {p for group in self.inner.param_groups for p in group["params"]}
        for parameter, number in self.numbers().items():
            if parameter in trained and number in rows:  # FSDP's copies; its parts follow
                self.inner.state[parameter] = deepcopy(rows[number])
        for shards, parts, numbers in self.shards():
            for part, number, owned_slice in zip(parts, numbers, shards.owned_slices, strict=True):
                for key, value in rows.get(number, {}).items():
                    if key in elementwise:
                        self.inner.state[part][key] = value.reshape(-1)[owned_slice].clone()
                    else:
                        self.inner.state[part][key] = deepcopy(value)
        for tensor, row in self.inner.state.items():  # checkpoints are read to the CPU
            row.update({key: row[key].to(tensor.device) for key in row.keys() & elementwise})
