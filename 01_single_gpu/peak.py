"""The peak of a training step, in bytes: rehearsed without memory, or measured.

    python 01_single_gpu/peak.py

The rehearsal does a step on the meta device, whose tensors have shapes but no data, while a ledger
counts what is alive. Where is the peak?

- At the end of forward, as a rule. All that backward needs is there, and so are the gradients of
  the previous step, since zero_grad comes after forward. The peak is the sum of the parts.
- In backward, if the first layers have the largest outputs: their gradients are as large, and need
  space while most activations are still there.
- In the optimizer's step, if the batch is small: Adam needs a temporary. On a CPU it goes from one
  parameter to the next. On a GPU it takes all at once, and the temporary is as large as all of them
  ("foreach" in the documentation of torch.optim).

The workspaces that libraries need for an operation (cuDNN, cuBLAS, oneDNN) are not counted.
"""

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from common.data import Images
from common.models import build_model
from common.options import Parser

MIB = 2**20
BLOCK = 512  # bytes: CUDA's allocator gives whole blocks ("Memory management" in the CUDA notes)
OPTIMIZERS: dict[str, Callable] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
}
KINDS = ("parameters", "buffers", "gradients", "optimizer state")


class Ledger(TorchDispatchMode):
    """A context that counts the bytes of meta tensors: those alive now, and the most at a moment.

    It sees what every operation makes and when that is freed. Its base class is public in spite of
    the underscore: PyTorch's notes "Extending PyTorch" show it.
    device: cuda or cpu, whose allocator is imitated. moment: the name of what runs now. counted:
    where the tensors are that it counts, for real ones instead of meta tensors: cpu.
    """

    def __init__(self, device: str, counted: str = "meta") -> None:
        super().__init__()
        self.counted = counted
        self.block = BLOCK if device == "cuda" else 1
        self.moment = ""
        self.bytes = 0
        self.peaks: dict[str, int] = {}  # the peak of each moment
        self.alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.counted:
                self.add(tensor.untyped_storage())
        self.peaks[self.moment] = max(self.bytes, self.peaks.get(self.moment, 0))
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.alive:  # the result is a view, or was written into an operand
            return
        size = -(-storage.nbytes() // self.block) * self.block
        self.alive[key] = weakref.ref(storage, lambda _: self.free(key, size))
        self.bytes += size

    def free(self, key: int, size: int) -> None:
        del self.alive[key]
        self.bytes -= size


def peak_of(device: str, function: Callable[[], object]) -> int:
    """The most bytes that a function holds at one moment, as the device's allocator counts."""
    if device == "cuda":
        with torch.device("cuda"):
            function()  # a first call, in which cuBLAS takes the workspaces that it keeps
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in events))  # freed bytes are negative


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


def train_one_step(
    plan: Plan,
    batch: int,
    micro_batches: int = 1,
    enter: Callable[[str], object] = lambda moment: 0,
) -> None:
    """One step as train.py does it, on the default device. It calls enter with what begins.

    micro_batches: so many, each of this size, add up their gradients for the step.
    """
    model, optimizer = plan.build()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.device("cpu"):  # where Adam counts its steps, in torch 2.11 too
        optimizer.step()  # gradients and the optimizer's state are there, as after any step
    for micro_batch in range(micro_batches):
        enter("forward")
        loss = plan.loss(model, batch)
        if micro_batch == 0:
            optimizer.zero_grad()
        enter("backward")
        (loss / micro_batches).backward()
    enter("optimizer")
    optimizer.step()


@lru_cache
def peaks(plan: Plan, batch: int, micro_batches: int = 1) -> dict[str, int]:
    """The most bytes that a step will need in forward, in backward, and in the optimizer."""
    ledger = Ledger(plan.device)
    with torch.device("meta"), ledger:
        train_one_step(plan, batch, micro_batches, lambda moment: setattr(ledger, "moment", moment))
    return ledger.peaks


def rehearsed_peak(plan: Plan, batch: int, micro_batches: int = 1) -> tuple[int, str]:
    """The bytes that a step will need at its peak, and where the peak is."""
    bytes_at = peaks(plan, batch, micro_batches)
    moment = max(bytes_at, key=lambda moment: bytes_at[moment])
    return bytes_at[moment], moment


def measured_peak(plan: Plan, batch: int, micro_batches: int = 1) -> int:
    """The bytes that a step needed at its peak, on a real device."""
    return peak_of(plan.device, lambda: train_one_step(plan, batch, micro_batches))


def parts_of(plan: Plan) -> dict[str, int]:
    """Bytes of what stays from step to step, and of the activations that each sample adds."""
    with torch.device("meta"):
        model, optimizer = plan.build()
        saved = [count_saved(plan, model, batch) for batch in (2, 3)]  # BatchNorm may refuse 1
        plan.loss(model, 2).backward()
    optimizer.step()
    parameters = list(model.parameters())
    state = [value for row in optimizer.state.values() for value in row.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor) and value.is_meta]
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds = parameters, list(model.buffers()), gradients, tensors
    sizes = [sum(tensor.nbytes for tensor in kind) for kind in kinds]
    return {**dict(zip(KINDS, sizes, strict=True)), "a sample's activations": saved[1] - saved[0]}


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
                peak, moment = rehearsed_peak(plan, batch)
                mib = [f"{number / MIB:,.1f}" for number in (sum(fixed) + batch * sample, peak)]
                rows.append((model, optimizer, batch, *mib, moment))
    print("A training step on a GPU, in MiB: the sum of its parts, and the rehearsed peak\n")
    heads = ("model", "optimizer", "batch", "sum", "peak", "in")
    align = ("left", "left", "right", "right", "right", "left")
    print(tabulate(rows, heads, disable_numparse=True, colalign=align))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
