"""Checkpoints of PyTorch's own sharded classes, with the methods that full_state.py has.

Their files, too, are in the format that all stages share, so each can resume the other's.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from full_state import Collected, State, groups_with


class LibraryZeroState(Collected):
    """A ZeroRedundancyOptimizer as a checkpoint holds it."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.load_state_dict = optimizer.load_state_dict

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def collect(self) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        self.collected = self.optimizer.state_dict() if dist.get_rank() == 0 else {}


FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)  # in CPU memory


class LibraryModelState(Collected):
    """A model of fully_shard as a checkpoint holds it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def collect(self) -> None:
        self.collected = get_model_state_dict(self.model, options=FULL_ON_RANK_0)

    def load_state_dict(self, state: State) -> None:
        set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=True))


class LibraryOptimizerState(Collected):
    """The optimizer of a model of fully_shard as a checkpoint holds it.

    PyTorch names the parameters where the stages' files number them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.names = [name for name, _ in model.named_parameters()]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def collect(self) -> None:
        named: Any = get_optimizer_state_dict(self.model, self.optimizer, options=FULL_ON_RANK_0)
        if dist.get_rank() != 0:
            return
        number = {name: i for i, name in enumerate(self.names)}
        state = {number[name]: row for name, row in named["state"].items()}
        groups = groups_with(named["param_groups"], number)
        self.collected = {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, saved: State) -> None:
        state = {self.names[number]: row for number, row in saved["state"].items()}
        groups = groups_with(saved["param_groups"], self.names)
        named: Any = {"state": state, "param_groups": groups}
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, named, options=options)
