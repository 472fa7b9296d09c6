"""The peak of a training step, in bytes: rehearsed without memory, or measured.

    python 01_single_gpu/peak.py

The rehearsal does a step on the meta device, while a ledger counts. Where is the peak?

- At the end of forward, as a rule. All that backward needs is there, and so are the gradients of
  the previous step, since zero_grad comes after forward. The peak is the sum of the parts.
- In backward, if the first layers have the largest outputs: their gradients are as large, and need
  space while most activations are still there.
- In the optimizer's step, if the batch is small: Adam needs a temporary. On a CPU it goes from one
  parameter to the next. On a GPU it takes all at once, and the temporary is as large as all of them
  ("foreach" in the documentation of torch.optim).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD, Adam, AdamW, Optimizer

from common.data import Images
from common.models import build_model
from common.options import Parser
from ledger import MIB, Ledger, measure

OPTIMIZERS: dict[str, Callable] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
}
KINDS = ("parameters", "buffers", "gradients", "optimizer state")


@dataclass(frozen=True)
class Plan:
    """What is trained, and on which device: cpu, or cuda, which a rehearsal does not need."""

    model: str
    image_size: int
    optimizer: str
    device: str = "cuda"
    channels: int = 3
    classes: int = 10

    def build(self) -> tuple[nn.Module, Optimizer]:
        """The model, on the default device, and its optimizer."""
        image = torch.zeros(1, self.channels, self.image_size, self.image_size, dtype=torch.uint8)
        model = build_model(self.model, Images(image, torch.zeros(1), self.classes, "digits"))
        create, at_once = OPTIMIZERS[self.optimizer], self.device == "cuda"  # as torch itself does
        return model, create(model.parameters(), lr=1e-3, foreach=at_once)

    def loss(self, model: nn.Module, batch: int) -> torch.Tensor:
        images = torch.randn(batch, self.channels, self.image_size, self.image_size)
        return F.cross_entropy(model(images), torch.zeros(batch, dtype=torch.long))


def train(
    plan: Plan, batch: int, accumulate: int = 1, enter: Callable[[str], object] = lambda moment: 0
) -> None:
    """One step as train.py does it, on the default device. It calls enter with what begins.

    accumulate: how many micro-batches, each of this size, add up their gradients for the step.
    """
    model, optimizer = plan.build()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.device("cpu"):  # where Adam counts its steps, in torch 2.11 too
        optimizer.step()  # gradients and the optimizer's state are there, as after any step
    for micro_batch in range(accumulate):
        enter("forward")
        loss = plan.loss(model, batch)
        if micro_batch == 0:
            optimizer.zero_grad()
        enter("backward")
        (loss / accumulate).backward()
    enter("optimizer")
    optimizer.step()


@lru_cache
def rehearse(plan: Plan, batch: int, accumulate: int = 1) -> tuple[int, str]:
    """The bytes that a step will need at its peak, and where the peak is."""
    ledger = Ledger(plan.device)
    with torch.device("meta"), ledger:
        train(plan, batch, accumulate, lambda moment: setattr(ledger, "moment", moment))
    return ledger.peak, ledger.peak_moment


def run(plan: Plan, batch: int, accumulate: int = 1) -> int:
    """The bytes that a step needed at its peak, on a real device."""
    return measure(plan.device, lambda: train(plan, batch, accumulate))


def parts_of(plan: Plan) -> dict[str, int]:
    """Bytes of what stays from step to step, and of the activations that each sample adds."""
    with torch.device("meta"):
        model, optimizer = plan.build()
        saved = [count_saved(plan, model, batch) for batch in (2, 3)]  # BatchNorm may refuse 1
        plan.loss(model, 2).backward()
    optimizer.step()
    parameters = list(model.parameters())
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor) and value.is_meta]
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds = parameters, list(model.buffers()), gradients, tensors
    found = [sum(tensor.nbytes for tensor in kind) for kind in kinds]
    return {**dict(zip(KINDS, found, strict=True)), "a sample's activations": saved[1] - saved[0]}


def count_saved(plan: Plan, model: nn.Module, batch: int) -> int:
    """Bytes that autograd saves in forward and loss; two tensors may share a storage."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = plan.loss(model, batch)
    del loss
    return sum(storage.nbytes() for storage in storages.values())


def main() -> None:
    rows = []
    for model, size in (("net", 28), ("resnet18", 224), ("resnet50", 224)):
        for optimizer in ("sgd", "adam"):
            for batch in (1, 64):
                plan = Plan(model, size, optimizer)
                *fixed, sample = parts_of(plan).values()
                peak, moment = rehearse(plan, batch)
                mib = [f"{number / MIB:,.1f}" for number in (sum(fixed) + batch * sample, peak)]
                rows.append((model, optimizer, batch, *mib, moment))
    print("A training step on a GPU, in MiB: the sum of its parts, and the rehearsed peak\n")
    heads = ("model", "optimizer", "batch", "sum", "peak", "in")
    align = ("left", "left", "right", "right", "right", "left")
    print(tabulate(rows, heads, disable_numparse=True, colalign=align))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
