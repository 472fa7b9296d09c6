"""Local SGD and DiLoCo: ranks train alone for H steps, and then average what they have changed.

    torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/local_sgd.py

DDP sends gradients in every step, so a slow link makes every step slow. Here, the ranks send once
in H steps, and the optimizer of the loop stays as it is:

    outer = LocalSGD(model, every=32)  # every rank now has rank 0's weights and buffers
    for images, labels in loader:
        ...
        optimizer.step()
        outer.step()                   # only every 32nd call sends anything
    outer.finish()                     # every rank now has the same weights; then evaluate and save

The mean change is treated as a gradient, with which a second optimizer takes the outer step. With
rate 1 and without momentum, that step is the mean of the weights (Stich, Local SGD Converges Fast
and Communicates Little, arXiv 1805.09767). DiLoCo takes Nesterov's momentum (Douillard et al.,
arXiv 2311.08105). Page: local_sgd.md
"""

import copy
import os
import socket
import struct
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, Subset

from alpha_beta import Job, Link, ring, step
from common.data import ImageSet, collate, load_dataset
from common.models import build_model
from common.options import Parser, UsageError, exit_on, float_at_least, int_at_least
from forecast import GBIT
from gradient_order import fill_buckets, gradients_of_classifier

Wait = Callable[[], Tensor]  # waits until a mean has arrived, and returns it
CHUNK = 1024  # numbers that share a scale in int8


def start_mean_in_full(change: Tensor) -> Wait:
    """Start to average (P,) numbers over the ranks, in the dtype that they have."""
    message = change.clone()
    work = dist.all_reduce(message, async_op=True)  # every rank must reach this line

    def wait() -> Tensor:
        work.wait()
        return message / dist.get_world_size()

    return wait


def start_mean_in_bf16(change: Tensor) -> Wait:
    wait = start_mean_in_full(change.bfloat16())
    return lambda: wait().to(change.dtype)


def start_mean_in_int8(change: Tensor) -> Wait:
    """The same in bytes, and in two halves, like those of a ring's all-reduce.

    An all-reduce would add up bytes, and they would overflow. So each rank gets everyone's bytes
    for one part of the numbers, averages that part in fp32, and sends the mean to everyone.
    """
    ranks = dist.get_world_size()
    padding = -len(change) % (ranks * CHUNK)
    parts = F.pad(change.float(), (0, padding)).view(ranks, -1, CHUNK)  # part i is for rank i
    mine = to_bytes(parts)  # (ranks, chunks, CHUNK + 4)
    theirs = torch.empty_like(mine)  # part of this rank, from each rank
    work: Any = dist.all_to_all_single(theirs, mine, async_op=True)

    def wait() -> Tensor:
        work.wait()
        mean = to_bytes(from_bytes(theirs).mean(dim=0, keepdim=True))  # (1, chunks, CHUNK + 4)
        # A rank also takes the bytes of its own part, or its weights would differ from the others'.
        dist.all_gather_into_tensor(mine, mean)
        return from_bytes(mine).flatten()[: len(change)].to(change.dtype)

    return wait


def to_bytes(values: Tensor) -> Tensor:
    """(..., CHUNK) fp32 -> (..., CHUNK + 4) int8: levels from -127 to 127, then their scale."""
    scale = values.abs().amax(dim=-1, keepdim=True) / 127
    levels = (values / scale.clamp(min=1e-30)).round().to(torch.int8)
    return torch.cat([levels, scale.view(torch.int8)], dim=-1)


def from_bytes(message: Tensor) -> Tensor:
    levels, scale = message.split([CHUNK, 4], dim=-1)
    return levels * scale.contiguous().view(torch.float32)


MESSAGES = {"full": start_mean_in_full, "bf16": start_mean_in_bf16, "int8": start_mean_in_int8}


class LocalSGD:
    """Every so many steps, one outer step of all ranks with the mean of what each has changed.

    lr, momentum: of the outer step; 1 and 0 average the weights. late: a message travels during the
    next round, and its mean is used at the end of that. All ranks must take equally many steps.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        message: str = "full",
        late: bool = False,
    ) -> None:
        if message not in MESSAGES or every < 1:
            expected = f"message one of {', '.join(MESSAGES)}, and every at least 1"
            raise ValueError(f"got message={message!r}, every={every}; expected {expected}")
        self.model, self.every, self.late = model, every, late
        self.start_mean, self.steps = MESSAGES[message], 0
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)  # every rank must reach this line
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.shared = self.weights()  # what all ranks agree on
        self.round_start = self.shared  # where this rank began its round
        self.outer = SGD([self.shared], lr, momentum, nesterov=momentum > 0)
        self.pending_mean: Wait | None = None

    def weights(self) -> Tensor:
        """A copy of the trained parameters, (P,)."""
        return torch.cat([p.detach().flatten() for p in self.parameters])

    @torch.no_grad()
    def step(self) -> None:
        """Call it after each step of the optimizer."""
        self.steps += 1
        if self.steps == self.every:
            self.exchange()

    def exchange(self) -> None:
        change = self.round_start - self.weights()  # like a gradient, it points uphill
        wait: Wait | None = self.start_mean(change)
        if self.late:
            wait, self.pending_mean = (
                self.pending_mean,
                wait,
            )  # of the round before
        if wait:
            self.outer_step(wait)
        # What is not averaged yet, a rank keeps for itself.
        self.set_weights(self.shared - change if self.late else self.shared)

    def outer_step(self, wait: Wait) -> None:
        self.shared.grad = wait()  # every rank must reach this line
        self.outer.step()

    def set_weights(self, weights: Tensor) -> None:
        self.round_start, self.steps = weights, 0
        pieces = weights.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))

    @torch.no_grad()
    def finish(self) -> None:
        """Average what is left, and BatchNorm's running statistics, which no round has sent."""
        if self.steps:
            self.exchange()
        if self.pending_mean:
            self.outer_step(self.pending_mean)
            self.pending_mean = None
            self.set_weights(self.shared)
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)  # every rank must reach this line
                buffer /= dist.get_world_size()


# What follows only shows it: the same training in several ways, and the bytes that each sends.

DDP, NEVER = "DDP", "never"
STEPS, LOCAL_BATCH, LR = 100, 30, 0.02


def methods(every: int) -> dict[str, dict[str, Any]]:
    """How the ranks talk to each other, and the options of LocalSGD for it."""
    mean, diloco = {"lr": 1.0, "momentum": 0.0, "every": every}, {"every": every}
    return {
        DDP: {},
        "mean, H = 1": {**mean, "every": 1},
        f"mean, H = {every}": mean,
        f"DiLoCo, H = {every}": diloco,
        f"DiLoCo, H = {every}, int8": {**diloco, "message": "int8"},
        f"mean, H = {every}, late": {**mean, "late": True},
        NEVER: {},
    }


def batches(data: ImageSet, local_batch: int, steps: int, seed: int) -> Iterator[Any]:
    """This rank's batches: the same for each method, and together those of one process."""
    sampler = DistributedSampler(data, seed=seed, drop_last=True)
    loader = DataLoader(data, local_batch, sampler=sampler, drop_last=True, collate_fn=collate)

    def epochs() -> Iterator[Any]:
        for epoch in range(steps):  # enough, if each has one batch
            sampler.set_epoch(epoch)
            yield from loader

    return islice(epochs(), steps)


def train(
    how: str, options: dict[str, Any], model: nn.Module, batches: Iterator[Any], lr: float = LR
) -> nn.Module:
    """Train a copy of the model and return it: the same on all ranks, unless they never talk."""
    model = copy.deepcopy(model).train()
    wrapped = DistributedDataParallel(model) if how == DDP else model
    optimizer = SGD(model.parameters(), lr, momentum=0.9)
    outer = LocalSGD(model, **options) if options else None
    for images, labels in batches:
        loss = F.cross_entropy(wrapped(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if outer:
            outer.step()
    if outer:
        outer.finish()
    if how == DDP:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # as stage 04 does before it evaluates
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet) -> float:
    """The share of correct answers. Each rank answers its part of the test set."""
    model.eval()
    mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    correct = torch.zeros((), dtype=torch.int64)
    for images, labels in DataLoader(mine, 500, collate_fn=collate):
        correct += (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(data)


def mean_of_everyones_int8(change: Tensor) -> Wait:
    """The naive way, for comparison: each rank receives all bytes of all ranks."""
    mine = to_bytes(F.pad(change, (0, -len(change) % CHUNK)).view(1, -1, CHUNK))
    everyones = mine.expand(dist.get_world_size(), -1, -1).contiguous()
    work: Any = dist.all_gather_into_tensor(everyones, mine, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return from_bytes(everyones).mean(dim=0).flatten()[: len(change)]

    return wait


NAIVE = "int8, from everyone"
WAYS = {"fp32": start_mean_in_full, "bf16": start_mean_in_bf16, "int8": start_mean_in_int8}
WAYS[NAIVE] = mean_of_everyones_int8


def expected_bytes(way: str, numbers: int, ranks: int) -> float:
    """What each rank sends for one mean of so many fp32 numbers."""
    parts = 1 if way == NAIVE else ranks
    in_int8 = -(-numbers // (parts * CHUNK)) * parts * (CHUNK + 4)  # padded, with its scales
    size = {"fp32": 4 * numbers, "bf16": 2 * numbers}.get(way, in_int8)
    if way == NAIVE:
        return (ranks - 1) * size
    return 2 * (ranks - 1) / ranks * size  # a reduce-scatter, or all-to-all, and an all-gather


def sent_bytes() -> int:
    """What this process has sent over TCP so far, as Linux counts it; see `man 7 tcp`."""
    dist.barrier()  # what any rank has sent before, has arrived
    total = 0
    for path in Path("/proc/self/fd").glob("*"):  # elsewhere than on Linux, there is none
        if not path.is_socket():
            continue
        connection = socket.socket(fileno=int(path.name))
        if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            # tcpi_bytes_sent and tcpi_bytes_retrans in include/uapi/linux/tcp.h, since Linux 4.19:
            # a busy machine sends some bytes again, because their answer is late.
            sent, sent_again = struct.unpack_from("QQ", found, 200)
            total += sent - sent_again
        connection.detach()  # it stays open, because it is not ours
    return total


def compare_bytes(numbers: int, counts: tuple[int, ...]) -> str:
    """A table: the MB that a rank sends for one mean, counted here and computed for more ranks."""
    ranks, rows = dist.get_world_size(), []
    for way, start_mean in WAYS.items():
        before = sent_bytes()
        start_mean(torch.randn(numbers))()
        counted = f"{(sent_bytes() - before) / 1e6:.2f}"
        expected = [f"{expected_bytes(way, numbers, n) / 1e6:.2f}" for n in (ranks, *counts)]
        rows.append((way, counted, *expected))
    heads = (f"counted, {ranks} ranks", "computed", *(f"{n} ranks" for n in counts))
    return tabulate(rows, ("", *heads), disable_numparse=True)


def compare_trainings(every: int) -> str:
    """A table: what each method sends, and what it learns."""
    args = Namespace(dataset="digits", data_dir=Path("data"), batch_size=LOCAL_BATCH)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(0)
    start, rows, ddp = build_model("net-bn", train_set), [], torch.zeros(())
    for how, options in methods(every).items():
        before = sent_bytes()
        model = train(how, options, start, batches(train_set, LOCAL_BATCH, STEPS, seed=0))
        sent = f"{(sent_bytes() - before) / 1e6:.1f}"
        weights = nn.utils.parameters_to_vector(model.parameters())
        ddp = weights if how == DDP else ddp
        distance = ((weights - ddp).norm() / ddp.norm()).item()
        messages = 0 if how == NEVER else -(-STEPS // options.get("every", 1))  # the last is short
        rows.append((how, messages, sent, f"{distance:.1%}", f"{accuracy(model, test_set):.1%}"))
    heads = ("the ranks talk", "times", "MB sent by a rank", "distance to DDP", "test accuracy")
    return tabulate(rows, heads, disable_numparse=True)


def step_seconds(way: str, every: int, seconds: float, numbers: int, link: Link) -> float:
    """The time of a step on 2 ranks that send one mean in so many steps, and then wait for it."""
    message = 2 * link.alpha + expected_bytes(way, numbers, 2) / link.beta
    return seconds + message / every


def slowdowns(step_ms: float, gbit: float) -> dict[str, float]:
    """A step of resnet18 on 2 ranks over its computing, computed by alpha_beta.py for this link."""
    seconds, link = step_ms / 1000, Link(50e-6, gbit * GBIT)
    buckets = fill_buckets(gradients_of_classifier("resnet18", 64))
    job = Job(seconds / 3, 2 * seconds / 3, 0.0, buckets)
    numbers = int(sum(bucket.size for bucket in buckets) / 4)
    found = {DDP: step(job, partial(ring, ranks=2, link=link)).seconds}
    for every, way in product((8, 32), ("fp32", "bf16", "int8")):
        found[f"H = {every}, {way}"] = step_seconds(way, every, seconds, numbers, link)
    return {how: each / seconds for how, each in found.items()}


def compare_links(step_ms: float) -> str:
    """A table: the slowdowns on three links."""
    links = {f"{gbit:g} Gbit/s": slowdowns(step_ms, gbit) for gbit in (0.2, 1, 10)}
    names = next(iter(links.values()))
    rows = [(how, *(f"{found[how]:.2f}" for found in links.values())) for how in names]
    return tabulate(rows, ("the ranks talk", *links), disable_numparse=True)


def main() -> None:
    parser = Parser(__doc__)
    add, text = parser.add_argument, "H: steps of a rank between two messages"
    add("--every", default=25, type=int_at_least(2, below=STEPS + 1), metavar="H", help=text)
    text = "a step of resnet18 without messages, for the last table"
    add("--step-ms", default=300.0, type=float_at_least(1e-3), metavar="MS", help=text)
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise UsageError(
            "one rank talks to nobody: start two, with "
            "torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/local_sgd.py"
        )
    # All ranks are on this machine: they meet on loopback, where no one else can connect.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname()[0] == "Darwin" else "lo")
    dist.init_process_group("gloo")
    trainings, table = compare_trainings(args.every), compare_bytes(10**6, (4, 8, 16))
    if dist.get_rank() == 0:
        print(f"net-bn, {STEPS} steps with {LOCAL_BATCH} digits on each of the ranks:\n")
        print(f"{trainings}\n\nMB that a rank sends for one mean of a million numbers:\n\n{table}")
        print(f"\nresnet18 on 2 ranks, computed: a step / its {args.step_ms:g} ms of computing\n")
        print(compare_links(args.step_ms))
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
