"""Switches that may make a step faster: the lines to add to train.py, and their effect here.

    python 05_amp_syncbn/switches.py

Two ranks train copies of one small network under DDP, each copy with one switch on. The copies take
turns, and a time is relative to plain DDP in the same round: "DDP again" shows the noise. The
weights are compared after three steps. `bench.py switches` measures a larger network.
"""

import copy
import logging
import os
import time
from collections.abc import Callable
from operator import truediv
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.models import Net
from common.options import Parser, UsageError
from machine import refuse_no_compiler

LOCAL_BATCH, ROUNDS, STEPS = 32, 11, 3  # STEPS: in a round, and before the weights are compared
HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
LINES = {  # to add to train.py
    "channels_last": [
        "model = model.to(memory_format=torch.channels_last)  # before DDP",
        "images = images.to(memory_format=torch.channels_last)  # for each batch",
    ],
    "compile": ["ddp.compile()  # after DDP"],
    "bf16 hook": [
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # at the top",
        "ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)  # after DDP",
    ],
}


def channels_last(model_or_images: Any) -> Any:
    """Store all channels of a pixel side by side, as fast convolutions read them.

    The model and each batch need it: if only one of them has it, each layer converts the other.
    """
    return model_or_images.to(memory_format=torch.channels_last)


def compiled(model: nn.Module, dynamic: bool | None = None) -> nn.Module:
    """Fuse operations into kernels. The first step takes seconds or minutes.

    In place, so that no name in a checkpoint begins with `_orig_mod.` Compile the DDP wrapper: then
    evaluating the plain model, on batches of other shapes, compiles nothing.
    """
    model.compile(dynamic=dynamic)
    return model


def hooked(ddp: DistributedDataParallel, dtype: str) -> DistributedDataParallel:
    """Send gradients in 16 bits, which halves the bytes. All ranks still get the same mean."""
    ddp.register_comm_hook(None, HOOKS[dtype])
    return ddp


def build(switch: str, model: nn.Module, images: Tensor) -> tuple[nn.Module, Callable[[], None]]:
    """A copy of the model with the switch on, and a function that trains it for one step."""
    model = copy.deepcopy(model)
    if switch == "channels_last":
        model, images = channels_last(model), channels_last(images)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if switch == "compile":
        compiled(ddp)
    if switch == "bf16 hook":
        hooked(ddp, "bf16")
    optimizer = SGD(model.parameters(), 0.02, 0.9)
    labels = torch.arange(len(images)) % 10

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(ddp(images), labels).backward()
        optimizer.step()

    return model, step


def relative_times(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The time of each step relative to that of plain DDP: the median over the rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()  # every rank must reach this line
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(map(truediv, row, seconds["DDP"])) for name, row in seconds.items()}


def compare(rank: int, port: int) -> None:
    """What each rank does; rank 0 prints the table."""
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)  # torch.compile warns about its own internals
    switches = ["DDP", "DDP again", *LINES]
    try:
        refuse_no_compiler(torch.device("cpu"))
    except UsageError as error:  # on both ranks: they share the machine
        switches.remove("compile")
        if rank == 0:
            print(f"compile is left out: {error}\n")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(rank)
    images = torch.randn(LOCAL_BATCH, 3, 32, 32)
    network = Net(channels=3, image_size=32, classes=10, batch_norm=True)
    steps, weights = {}, {}
    for switch in switches:
        model, steps[switch] = build(switch, network, images)
        for _ in range(STEPS):
            steps[switch]()
        weights[switch] = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = []
    for switch, ratio in relative_times(steps).items():
        off = (weights[switch] - weights["DDP"]).abs().max().item()
        rows.append((switch, f"{ratio:.2f}", f"off by {off:.0e}" if off else "same bits"))
    steps.clear()  # DDP and its hooks must be gone before the process group is
    if rank == 0:
        print(tabulate(rows, ("", "time", "weights"), disable_numparse=True))
    dist.destroy_process_group()


def main() -> None:
    for switch, lines in LINES.items():
        print(switch, *lines, sep="\n    ")
    print(flush=True)
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    mp.spawn(compare, args=(store.port,), nprocs=2)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or it starts more processes
    Parser(__doc__).parse_args()
    main()
