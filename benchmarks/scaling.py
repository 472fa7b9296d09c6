"""Predict the time of a DDP step before it is measured, then measure it.

    python benchmarks/scaling.py

The model is 04_ddp_torchrun/alpha_beta.py. What it needs is measured apart from DDP, in the same
rounds (timing.py), and predictions.py makes numbers of it. Steps without DDP give the computing,
and when each gradient is ready. Some convolutions, with and without an all-reduce behind or beside
them, give alpha, beta, and what communication takes from the computing beside it. No number is
fitted to a step of DDP: all of those are held out. World sizes 1 to 4, three models; then, where
network namespaces are allowed (root, tc), two nodes whose cable gets slower and slower.
Writes 04_scaling.json and .png under results/.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from links import TWO_NODES, set_rate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from common.models import Net
from common.options import Parser, usage_errors_exit

from predictions import (
    AFTER,
    ALONE,
    BESIDE,
    COPIED,
    COPY,
    HOW,
    LONG,
    MEANWHILE,
    TIMES,
    WORK,
    draw_both,
    errors_of,
    predict,
    table,
)
from timing import (
    RESULTS,
    add_device,
    add_effort,
    chapter,
    interleave,
    keep,
    now,
    of_the_slowest,
    provenance,
    require_device,
)

start = chapter("03", "ranks").start
LONG_RUN = RESULTS / "04_scaling.json"
WORLDS = (1, 2, 3, 4)
SIZES = [2**14, 2**20, 2**22, MEANWHILE, 2**24, 25 * 2**20]  # bytes
SMALL = [2**10, 2**17, 2**20, MEANWHILE]  # for net, whose bucket has 87,360
RATES = {"no limit": "", "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "0.3 Gbit/s": "300mbit"}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model, as in reducers.py, and a local batch for it."""
    torch.manual_seed(0)
    if name == "net":
        return Net(1, 28, 10, batch_norm=False), torch.randn(64, 1, 28, 28)
    if name == "mlp":
        wide, hidden = nn.Linear(784, 2048), nn.Linear(2048, 2048)
        model = nn.Sequential(nn.Flatten(), wide, nn.ReLU(), hidden, nn.ReLU(), nn.Linear(2048, 10))
        return model, torch.randn(64, 1, 28, 28)
    return torchvision.models.resnet18(num_classes=10), torch.randn(16, 3, 64, 64)


class Alone:
    """Steps without DDP, which note when forward, each gradient, and backward are done."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        self.model, self.batch = copy.deepcopy(model), batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.9)
        self.labels = torch.arange(len(batch)) % 10
        self.parameters = list(self.model.parameters())
        self.notes: list[list[float]] = []  # shares of the step: forward, backward; of backward
        self.seen: dict[nn.Parameter, float] = {}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter: nn.Parameter) -> None:
        self.seen[parameter] = now()

    def step(self) -> None:
        begin = now()
        loss = F.cross_entropy(self.model(self.batch), self.labels)
        self.optimizer.zero_grad()
        forward = now()
        loss.backward()
        backward = now()
        self.optimizer.step()
        whole, back = now() - begin, backward - forward
        shares = [(self.seen[p] - forward) / back for p in self.parameters]
        self.notes.append([(forward - begin) / whole, back / whole, *shares])

    def shares(self) -> list[float]:
        return np.median(self.notes, axis=0).tolist()


def with_ddp(model: nn.Module, batch: Tensor, how: str = "DDP") -> Callable[[], None]:
    """What one step of DDP does; with no_sync, all of its micro-batches."""
    # Without its broadcast of BatchNorm's statistics: see reducers.py.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    ddp = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    if how == "DDP, bf16 hook":
        ddp.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01, 0.9)
    labels = torch.arange(len(batch)) % 10

    def step() -> None:
        optimizer.zero_grad()
        with ddp.no_sync():
            for _ in range(HOW[how][0] - 1):
                F.cross_entropy(ddp(batch), labels).backward()
        F.cross_entropy(ddp(batch), labels).backward()
        optimizer.step()

    return step


class Work:
    """Computing that has nothing to do with any model, with and without an all-reduce."""

    def __init__(self, sizes: list[int]) -> None:
        self.layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).requires_grad_(False)
        self.images = torch.randn(4, 64, 32, 32)
        self.tensors = {size: torch.zeros(size // 4) for size in sizes}
        self.here, self.there = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)

    def variants(self) -> dict[str, Callable[[], None]]:
        """Work; work, then an all-reduce of each size; long work, one all-reduce beside it."""
        found: dict[str, Callable[[], None]] = {WORK: self.work, COPY: self.there_and_back}
        for size in self.tensors:
            found[f"{AFTER} {size}"] = partial(self.then_reduce, size)
        found[LONG] = partial(self.work, TIMES)
        found[BESIDE] = self.reduce_meanwhile
        return found

    def work(self, times: int = 1) -> None:
        for _ in range(times):
            self.layer(self.images)

    def then_reduce(self, size: int) -> None:
        self.work()
        dist.all_reduce(self.tensors[size])  # every rank must reach this line

    def reduce_meanwhile(self) -> None:
        under_way = dist.all_reduce(self.tensors[MEANWHILE], async_op=True)
        self.work(TIMES)
        under_way.wait()

    def there_and_back(self) -> None:  # into a bucket, divided, and out of it
        torch.mul(self.here, 0.5, out=self.there)
        self.here.copy_(self.there)


def rounds_of(
    name: str, hows: list[str], rounds: int, sizes: list[int]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """What each rank does: seconds of all variants in each round, and notes of the model."""
    model, batch = build(name)
    alone = Alone(model, batch)
    variants = {ALONE: alone.step, **{how: with_ddp(model, batch, how) for how in hows}}
    variants |= Work(sizes).variants()
    times = of_the_slowest(interleave(variants, rounds, 1, meet=dist.barrier))
    gradients = [parameter.nbytes for parameter in model.parameters()]
    notes = {"gradients": gradients, "local_batch": len(batch), "shares": alone.shares()}
    return times, {"model": name, **notes}


def on_this_machine(
    worlds: tuple[int, ...], models: tuple[str, ...], rounds: dict[str, int], device: str = "cpu"
) -> list[dict[str, Any]]:
    """Predictions and measurements for each number of ranks and each model."""
    found = []
    for ranks in worlds:
        for model in models:
            sizes = SMALL if model == "net" else SIZES
            more = model, ["DDP"], rounds[model], sizes
            answers = start(ranks, rounds_of, *more, device=device)
            found.append(predict(answers[0][0], [note for _, note in answers]))
    return found


def node(out: Path) -> None:
    """What each of two nodes does, at each rate of the cable; node 0 writes what both found."""
    torch.set_num_threads(1)
    rank = int(os.environ["NODE_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {}
    for name, rate in RATES.items():
        set_rate(rate)
        sizes = SIZES[:-1] if "0." in name else SIZES
        times, note = rounds_of("resnet18", list(HOW), 9, sizes)
        shares = torch.tensor(note["shares"], dtype=torch.float64)
        both = [torch.empty_like(shares) for _ in range(2)]
        dist.all_gather(both, shares)  # every rank must reach this line
        found[name] = predict(times, [{**note, "shares": each.tolist()} for each in both])
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def across_links() -> dict[str, Any]:
    """Predictions and measurements on two nodes, for each rate; {} where that is not allowed."""
    if os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("ip"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = ["bash", str(TWO_NODES), sys.executable, __file__, "--node", str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RATE": ""}
        done = subprocess.run(command, env=env)
        return json.loads(out.read_text()) if done.returncode == 0 else {}


def measure(brief: bool, device: str = "cpu", quick: bool = False) -> dict[str, Any]:
    """Everything; `links` is empty in brief, and where namespaces are not allowed."""
    where = provenance(device, threads_a_rank=1, backend="gloo")  # before there is load
    rounds = (
        {"net": 15, "mlp": 9, "resnet18": 7} if brief else {"net": 51, "mlp": 25, "resnet18": 15}
    )
    if quick:
        rounds = dict.fromkeys(rounds, 2)
    worlds, models = ((2,), ("net",)) if quick else (WORLDS, tuple(rounds))
    machine = on_this_machine(worlds, models, rounds, device)
    links = {} if brief or quick or device != "cpu" else across_links()
    return {"provenance": where, "machine": machine, "links": links, **errors_of(machine, links)}


def long_run() -> dict[str, Any] | None:
    """What the run without --brief has left under results/, if it is there."""
    return json.loads(LONG_RUN.read_text()) if LONG_RUN.exists() else None


def main() -> None:
    parser = Parser(__doc__)
    quick = "two rounds of `net`, to see that it runs"
    add_effort(parser, quick, "fewer rounds, and no slow links")
    add_device(parser, "the ranks share one GPU, by way of gloo")
    text = "what two_nodes_here.sh runs in each namespace"
    parser.add_argument("--node", type=Path, metavar="FILE", help=text)
    args = parser.parse_args()
    if args.node:
        return node(args.node)
    require_device(args.device)
    results = measure(args.brief, args.device, args.quick)
    print(table(results))
    print(
        f"\n{results['predictions']} predictions: median error {results['median_error']:.1%}, "
        f"largest {results['largest_error']:.1%}"
    )
    keep(args, "04_scaling", results, draw_both)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
