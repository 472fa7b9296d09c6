"""Switches that may make a step faster: the lines to add to train.py, and what they change here.

    python 05_amp_syncbn/switches.py

Two ranks train copies of one small network under DDP, each copy with one switch on. The copies take
turns, and a time is relative to plain DDP in the same round. "DDP again" shows how far to trust it.
A switch pays where the layers are large or the link is slow: benchmarks/switches.py measures that.
"""

import copy
import logging
import os
import statistics
import time
from collections.abc import Callable

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

LOCAL_BATCH, ROUNDS, STEPS = 32, 15, 3  # STEPS: of a round, and before the weights are compared
HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
IMPORT_HOOKS = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks"
LINES = {  # what to add to train.py, and where
    "channels_last": {
        "before DDP": "model = model.to(memory_format=torch.channels_last)",
        "for each batch": "images = images.to(memory_format=torch.channels_last)",
    },
    "compile": {"after DDP": "ddp.compile()"},
    "bf16 hook": {
        "at the top": IMPORT_HOOKS,
        "after DDP": "ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)",
    },
    "fp16 hook": {
        "at the top": IMPORT_HOOKS,
        "after DDP": "ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)",
    },
}


def channels_last(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor]:
    """Store all channels of a pixel side by side, in the weights and in the batch.

    Convolutions of oneDNN and of tensor cores read them so. If only one of the two is in this
    layout, each layer converts the other.
    """
    layout = torch.channels_last
    return model.to(memory_format=layout), images.to(memory_format=layout)


def compiled(ddp: nn.Module, dynamic: bool | None = None) -> nn.Module:
    """Make one kernel of several operations. The first step of each shape takes seconds or minutes.

    In place, and of the wrapper: the names in the plain model gain no `_orig_mod.`, and evaluation
    on the plain model, whose batches have other shapes, compiles nothing.
    """
    ddp.compile(dynamic=dynamic)
    return ddp


def hooked(ddp: DistributedDataParallel, dtype: str) -> DistributedDataParallel:
    """Send gradients in 16 bits: half of the bytes. All ranks still get the same sums."""
    ddp.register_comm_hook(None, HOOKS[dtype])
    return ddp


def build(switch: str, model: nn.Module, images: Tensor) -> tuple[nn.Module, Callable[[], None]]:
    """A copy of the model, and what trains it for one step with the switch on."""
    model = copy.deepcopy(model)
    if switch == "channels_last":
        model, images = channels_last(model, images)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if switch == "compile":
        compiled(ddp)
    if switch.endswith("hook"):
        hooked(ddp, switch.split()[0])
    optimizer = SGD(model.parameters(), 0.02, 0.9)
    labels = torch.arange(len(images)) % 10

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(ddp(images), labels).backward()
        optimizer.step()

    return model, step


def relative_times(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The time of each step, relative to the first one: the median over rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()  # every rank must reach this line
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds[name].append(time.perf_counter() - start)
    plain, *_ = seconds.values()
    return {
        name: statistics.median(a / b for a, b in zip(row, plain, strict=True))
        for name, row in seconds.items()
    }


def compare(rank: int, port: int, switches: list[str]) -> None:
    """What each rank does; rank 0 prints the table."""
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)  # the compiler tells much else
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(rank)
    images = torch.randn(LOCAL_BATCH, 3, 32, 32)
    network = Net(channels=3, image_size=32, classes=10, batch_norm=True)
    steps, weights = {}, {}
    for switch in ("DDP", "DDP again", *switches):
        model, steps[switch] = build(switch, network, images)
        for _ in range(STEPS):
            steps[switch]()
        weights[switch] = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = []
    for switch, ratio in relative_times(steps).items():
        off = (weights[switch] - weights["DDP"]).abs().max().item()
        lines = [f"{line}  # {where}" for where, line in LINES.get(switch, {}).items()]
        rows.append((switch, f"{ratio:.2f}", f"{off:.0e}" if off else "same bits", *lines[:1]))
        rows += [("", "", "", line) for line in lines[1:]]
    if rank == 0:
        print(tabulate(rows, ("", "time", "weights", "add to train.py"), disable_numparse=True))
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    switches = list(LINES)
    try:
        refuse_no_compiler(torch.device("cpu"))
    except UsageError as error:
        switches.remove("compile")
        print(f"left out: {error}")
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    mp.spawn(compare, args=(store.port, switches), nprocs=2)


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
