"""Time a training step across a link that gets slower and slower, and count what crosses it.

    python benchmarks/links.py

It needs root, and Debian's iproute2: 04_ddp_torchrun/launch/two_nodes_here.sh makes two network
namespaces joined by a virtual cable, and each holds one rank of one thread. At each rate of the
cable all variants take turns (timing.py). A step is forward, backward, averaging and optimizer; its
time is that of the slower rank. The baseline only computes: its ranks never wait for each other.
Writes 04_links.json and .png under results/.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.options import Parser, UsageError, usage_errors_exit

from timing import (
    RESULTS,
    ROOT,
    SAME,
    chapter,
    draw_picture,
    interleave,
    of_the_slowest,
    provenance,
    save,
    summarize,
    table,
)

RANKS, BATCH, MICRO_BATCHES = 2, 32, 4
COMPUTE, PER_PARAMETER = "compute only", "per parameter"
DDP, NO_SYNC, BF16, POWER_SGD = "DDP", "DDP, 4 with no_sync", "DDP, bf16 hook", "DDP, PowerSGD hook"
VARIANTS = (COMPUTE, PER_PARAMETER, DDP, NO_SYNC, BF16, POWER_SGD)
RATES = {  # of the cable, as tc writes it, and how many rounds are enough
    "no limit": ("", 15),
    "10 Gbit/s": ("10gbit", 15),
    "1 Gbit/s": ("1gbit", 13),
    "0.2 Gbit/s": ("200mbit", 9),
}
TWO_NODES = ROOT / "04_ddp_torchrun" / "launch" / "two_nodes_here.sh"


def step_of(variant: str, model: torch.nn.Module, images: Tensor) -> Callable[[], None]:
    """What one step of this variant does, with a model of its own; of NO_SYNC: four of them."""
    model = copy.deepcopy(model)
    labels = torch.arange(len(images)) % 10
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    wrapped, average = model, lambda: None
    if variant == PER_PARAMETER:
        average = chapter("03", "reducers").REDUCERS["per-parameter"](model).finish
    elif variant != COMPUTE:
        # Without its broadcast of BatchNorm's statistics at each forward: nothing else sends them.
        # Newer torch has another name for the switch, and says so; torch 2.11 has only this one.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        # PowerSGD sends twice for each bucket, the second time from a thread of gloo as soon as the
        # first is done. With several buckets the order can then differ between ranks, which abort:
        # "Received data size doesn't match expected size". So it gets a single one.
        bucket = 100 if variant == POWER_SGD else 25  # MB
        wrapped = DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=bucket)
        if variant == BF16:
            wrapped.register_comm_hook(None, bf16_compress_hook)
        if variant == POWER_SGD:  # from the third step on; DDP rebuilds its buckets after the first
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook)

    def backward() -> None:
        F.cross_entropy(wrapped(images), labels).backward()

    def step() -> None:
        optimizer.zero_grad()
        if isinstance(wrapped, DistributedDataParallel) and variant == NO_SYNC:
            with wrapped.no_sync():
                for _ in range(MICRO_BATCHES - 1):
                    backward()
        backward()
        average()
        optimizer.step()

    return step


class Wire:
    """What this node sends in each step, by the counter of its network interface.

    Read between barriers: what a step has sent has then arrived. The barrier's own few hundred
    bytes are counted too, and of each of the kernel's packets of up to 64 KB one header.
    """

    def __init__(self) -> None:
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        self.counter = Path("/sys/class/net", interface, "statistics", "tx_bytes")
        self.sent: dict[str, list[int]] = {}
        self.variant, self.start = "", 0

    def watch(self, variant: str, step: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            self.variant = variant
            step()

        return watched

    def meet(self) -> None:
        dist.barrier()
        total = int(self.counter.read_text())
        if self.variant:
            self.sent.setdefault(self.variant, []).append(total - self.start)
        self.variant, self.start = "", total


def set_rate(rate: str) -> None:
    """Shape what leaves this node; the other one does the same. See two_nodes_here.sh."""
    link = ["dev", os.environ["GLOO_SOCKET_IFNAME"], "root"]
    subprocess.run(["tc", "qdisc", "del", *link], stderr=subprocess.DEVNULL)  # there may be none
    if rate:
        bucket = ["tbf", "rate", rate, "burst", "256kb", "limit", "16mb"]
        subprocess.run(["tc", "qdisc", "add", *link, *bucket], check=True)


def bits_per_second(rank: int, size: int) -> int:
    """What one way of the link carries: so many bytes of one tensor, from rank 0 to rank 1."""
    tensor = torch.ones(size, dtype=torch.uint8)
    seconds = torch.zeros(1, dtype=torch.float64)
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(seconds, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(seconds, 0)  # it has arrived
    return round(8 * size / (time.perf_counter() - start))


def measure(out: Path, quick: bool) -> None:
    """What each node does; node 0 writes what both have found."""
    rank, wire = int(os.environ["NODE_RANK"]), Wire()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    images = torch.randn(BATCH, 3, 64, 64)[: 2 if quick else BATCH]
    steps = {name: wire.watch(name, step_of(name, model, images)) for name in VARIANTS}
    rates: dict[str, Any] = {}
    for name, (rate, rounds) in RATES.items():
        if quick and rate not in ("", "1gbit"):
            continue
        set_rate(rate)
        for step in steps.values():
            for _ in range(1 if rates else 3):  # more at first, for DDP's buckets and for PowerSGD
                step()
        wire.variant = ""  # what the warm-up has sent does not count
        times = interleave(steps, 1 if quick else rounds, 1, warm_up=0, meet=wire.meet)
        times[NO_SYNC] = [seconds / MICRO_BATCHES for seconds in times[NO_SYNC]]  # of one
        wire.meet()  # counts the last one
        rates[name] = {
            "rounds": len(times[SAME]),
            "measured_bits_per_second": bits_per_second(rank, 2**20 if quick else 2**25),
            "variants": summarize(of_the_slowest(times)),
        }
    counted = {name: sorted(sent)[len(sent) // 2] for name, sent in wire.sent.items()}
    counted[NO_SYNC] //= MICRO_BATCHES
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "local_batch": len(images),
        "sent_bytes_a_step": counted,
        "rates": rates,
    }
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def draw(results: dict[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    colours = ("#000000", "#D55E00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7")  # Okabe and Ito
    for variant, colour in zip(VARIANTS, colours, strict=True):
        rows = [found["variants"][variant] for found in results["rates"].values()]
        ratios = [row["ratio"] for row in rows]
        ends = [[abs(end - row["ratio"]) for end in row["ratio_interval"]] for row in rows]
        label = f"{variant}: {results['sent_bytes_a_step'][variant] / 1e6:.1f} MB a step"
        bars: Any = list(zip(*ends, strict=True))
        axis.errorbar(range(len(rows)), ratios, bars, color=colour, marker="o", label=label)
    axis.set(yscale="log", ylabel="time of a step / time of computing only", xlabel="link")
    axis.set_xticks(range(len(results["rates"])), list(results["rates"]))
    ticks = [1, 1.5, 2, 3, 5, 10]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(title="and what each node sends")
    axis.set_title(
        f"resnet18, {BATCH} pictures of 64 × 64 a rank, 2 ranks of one thread on two nodes\n"
        f"{results['provenance']['hardware']}; bars: 95 % intervals"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = Parser(__doc__)
    text = "two rates, one step of two pictures with each, to see that it runs; nothing is written"
    parser.add_argument("--quick", action="store_true", help=text)
    text = "what two_nodes_here.sh runs in each namespace: measure, and write there"
    parser.add_argument("--node", type=Path, metavar="FILE", help=text)
    args = parser.parse_args()
    if args.node:
        return measure(args.node, args.quick)
    if os.geteuid() != 0 or not shutil.which("tc"):
        raise UsageError("network namespaces need root and tc: apt-get install iproute2, then sudo")
    where = provenance(world_size=RANKS, threads_a_rank=1)  # before there is load
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = ["bash", str(TWO_NODES), sys.executable, __file__, "--node", str(out)]
        command += ["--quick"] if args.quick else []
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RATE": ""}
        if subprocess.run(command, env=env).returncode != 0:
            raise UsageError("the nodes could not be started, or one has failed: see above")
        results = {"provenance": where, **json.loads(out.read_text())}
    for name, found in results["rates"].items():
        rate = found["measured_bits_per_second"] / 1e9
        print(f"\n{name}, {rate:.2f} Gbit/s measured\n{table(found['variants'])}")
    print("\nMB that each node sends in a step")
    for name, sent in results["sent_bytes_a_step"].items():
        print(f"{name:20} {sent / 1e6:8.2f}")
    if not args.quick:
        save(RESULTS / "04_links.json", results)
        draw_picture("04_links", draw)


if __name__ == "__main__":
    with usage_errors_exit():
        main()
