"""DataParallel under autocast: what reaches the threads of the replicas, and the two cures.

    python 02_data_parallel/autocast.py

Each thread has its own autocast: whether it is enabled, and its dtype. A new thread starts with it
off and with the default dtype of the device: float16 for a GPU, bfloat16 for the CPU. Here the
caller asks the CPU for float16. A thread that gives bfloat16 was told to cast, but not to what.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel.parallel_apply import parallel_apply

from common.options import Parser
from from_scratch import DataParallel

CPU = torch.device("cpu")
BATCH = torch.randn(4, 3)


class Plain(nn.Module):
    """Runs under whatever autocast state its thread has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Decorated(Plain):
    """Cure 1: a decorator on forward."""

    @torch.autocast("cpu", torch.float16)
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Inside(Plain):
    """Cure 2: a context inside forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.layer(x)


def no_threads(model: nn.Module) -> Tensor:
    return model(BATCH)


def plain_threads(model: nn.Module) -> Tensor:
    """Two replicas in threads that learn nothing of the caller's autocast."""
    outputs: dict[int, Tensor] = {}

    def work(index: int) -> None:
        outputs[index] = model(BATCH.chunk(2)[index])

    threads = [Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs[0]


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Make torch's parallel_apply use the CPU as accelerator, with streams that do nothing."""
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "current_accelerator": lambda: CPU,
        "current_stream": lambda device: nullcontext(),
        "device_index": lambda device: nullcontext(),
    }
    enabled = torch.is_autocast_enabled("cuda")  # the only one that parallel_apply asks for
    torch.set_autocast_enabled("cuda", torch.is_autocast_enabled("cpu"))
    try:
        with patch.multiple(torch.accelerator, **names):
            yield
    finally:
        torch.set_autocast_enabled("cuda", enabled)


def torchs_threads(model: nn.Module) -> Tensor:
    """torch's own parallel_apply, which nn.DataParallel calls, on two virtual replicas."""
    with cpu_as_accelerator():
        return parallel_apply([model, model], BATCH.chunk(2), devices=[0, 1])[0]


def our_threads(model: nn.Module) -> Tensor:
    return DataParallel(model, [CPU, CPU])(BATCH)


WAYS: dict[str, Callable[[nn.Module], Tensor]] = {
    "no threads": no_threads,
    "threads, told nothing": plain_threads,
    "torch's parallel_apply": torchs_threads,
    "from_scratch.py": our_threads,
}


def on_gpus() -> str:
    """What the real nn.DataParallel gives under an outer bfloat16 autocast."""
    if torch.cuda.device_count() < 2:
        return "not seen here: needs two GPUs"
    model = nn.DataParallel(Plain().cuda(), [0, 1])
    with torch.autocast("cuda", torch.bfloat16):
        return str(model(BATCH.cuda()).dtype)


def main() -> None:
    rows = []
    for way, run in WAYS.items():
        with torch.autocast("cpu", torch.float16):
            dtypes = [str(run(model()).dtype) for model in (Plain, Decorated, Inside)]
        rows.append((way, *dtypes))
    print("What a linear layer gives in the replicas, when the caller asks for float16 on the CPU:")
    print(tabulate(rows, ("run by", "outer autocast only", "decorator", "context inside")))
    print(f"\nnn.DataParallel, when the caller asks for bfloat16 on GPUs: {on_gpus()}")


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
