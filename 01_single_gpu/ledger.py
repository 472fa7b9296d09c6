"""A ledger of the bytes that are alive: what a computation will need, without allocating it.

    python 01_single_gpu/ledger.py

Tensors on the meta device have shapes but no data. The ledger sees what every operation makes and
when it is freed. TorchDispatchMode, its base class, is public in spite of the underscore: PyTorch's
notes "Extending PyTorch" show it.

On a GPU, the allocator rounds a block up to 512 bytes ("Memory management" in the CUDA notes). On a
CPU, operations need workspaces: oneDNN copies what a convolution reads and writes into a layout of
its own, with channels in blocks. The ledger counts what oneDNN does with AVX-512. With AVX2, a
small model took up to a quarter more. Workspaces on a GPU (cuDNN, cuBLAS) are not counted.
"""

import json
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from common.options import Parser

MIB, BLOCK = 2**20, 512  # bytes; CUDA's caching allocator gives whole blocks
aten = torch.ops.aten


class Ledger(TorchDispatchMode):
    """A context that counts the bytes of meta tensors: those alive now, and the most so far.

    device: cuda or cpu, whose rules apply. moment: the name of what runs now.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.moment, self.peak_moment = device, "", ""
        self.bytes = self.peak = 0
        self.alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.add(tensor.untyped_storage())
        extra = workspace(func, args, result) if self.device == "cpu" else 0
        if self.bytes + extra > self.peak:
            self.peak, self.peak_moment = self.bytes + extra, self.moment
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self.alive:  # the result is a view, or was written into an operand
            return
        if self.device == "cuda":
            size = -(-size // BLOCK) * BLOCK
        self.alive[key] = weakref.ref(storage, lambda _: self.free(key, size))
        self.bytes += size

    def free(self, key: int, size: int) -> None:
        del self.alive[key]
        self.bytes -= size


def workspace(func: Any, args: tuple, result: Any) -> int:
    """Bytes that an operation needs on a CPU, in addition to its result."""
    if func is aten.native_batch_norm_backward.default:
        return args[1].nbytes  # it makes the gradient of its input twice
    if func is aten.convolution.default:
        (x, weight), y = args[:2], result
    elif func is aten.convolution_backward.default:
        y, x, weight = args[:3]
    else:
        return 0
    if len(x) == 1 and x.numel() <= 20480 and weight.shape[-1] <= 3:
        return 0  # too small for oneDNN: use_mkldnn in ATen's Convolution.cpp
    return in_blocks(x, 1) + in_blocks(y, 1) + in_blocks(weight, 0, 1)


def in_blocks(tensor: Tensor, *channels: int) -> int:
    """Bytes of oneDNN's copy, with these dimensions in blocks of 8. Images are read uncopied."""
    if tensor.shape[channels[-1]] <= 3:
        return 0
    size = tensor.element_size()
    for dimension, length in enumerate(tensor.shape):
        size *= -(-length // 8) * 8 if dimension in channels else length
    return size


def measure(device: str, function: Callable[[], object]) -> int:
    """The most bytes that a function holds at one moment, as the device's allocator counts."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.device("cuda"):
            function()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in events))  # freed bytes: below 0


def main() -> None:
    ledger, rows = Ledger("cuda"), []
    with torch.device("meta"), ledger:

        def note(what: str) -> None:
            rows.append((what, ledger.bytes / MIB, ledger.peak / MIB))

        model = nn.Sequential(nn.Linear(1024, 1024), nn.Sigmoid(), nn.Linear(1024, 1024))
        note("two matrices of 4 MiB, two biases")
        x = torch.randn(512, 1024)
        note("a batch of 2 MiB")
        y = model(x)
        note("forward keeps two outputs of 2 MiB: y, and one that backward needs")
        loss = y.square().mean()
        note("loss")
        loss.backward()
        note("backward adds the gradients and frees what was saved")
        del y
        note("y deleted")
    print("MiB that are alive, and the most so far:\n")
    print(tabulate(rows, ("after", "alive", "peak"), floatfmt=".1f"))


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
