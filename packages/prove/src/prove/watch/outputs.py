"""Record the output of each layer before the first step, to find where a replay differs."""

import inspect
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from prove.comparable import NotComparableError, comparable
from prove.rank_record import LayerOutput
from prove.watch.batches import tensors_in
from prove.watch.model_tensors import projection_vector, without_wrappers
from prove.watch.rank_run import RankRun, is_loading

MAX_OUTPUTS = 2000


class OutputWatcher:
    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.names: dict[int, str] = {}  # layers of the current module, by id

    def is_wanted(self) -> bool:
        record = self.run.record
        return (
            record.step_count == 0
            and (self.run.joined or self.run.replaying)
            and len(record.outputs) < MAX_OUTPUTS
            and torch.is_grad_enabled()
        )

    def enter(self, root: nn.Module) -> None:
        """Note the layers of a module that the script calls.

        Transforms of data are left out, although those of torchvision are modules: one rank gets
        their results and never calls them.
        """
        if self.is_wanted() and root.training and not is_loading(inspect.currentframe()):
            self.names = {id(part): without_wrappers(name) for name, part in root.named_modules()}

    def leave(self, layer: nn.Module, outputs: Any) -> None:
        name = self.names.get(id(layer))  # DataParallel calls layers in several threads
        if name is None or not self.is_wanted():
            return
        tensor = next((each for each in tensors_in([outputs]) if each.ndim), None)
        if tensor is None or is_functorch_wrapped_tensor(tensor):
            return
        if tensor.is_nested or not tensor.numel():
            return  # the output has no rows of numbers by sample
        try:
            rows = comparable(tensor).reshape(len(tensor), -1)
        except NotComparableError:
            return
        products = rows @ projection_vector(rows.shape[1], rows.device)
        output = LayerOutput(name, type(layer).__name__, products.tolist())
        self.run.record.outputs.append(output)
