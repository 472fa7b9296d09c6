"""A large batch in K micro-batches: what its gradient is, and how often the ranks average it.

    torchrun --standalone --nproc-per-node=2 05_amp_syncbn/accumulate.py

DDP decides in forward whether the next backward averages: `no_sync` must be around forward.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from common.options import Parser, UsageError, exit_on
from local_ranks.ranks import init_gloo_or_refuse

MICRO_BATCHES, LOCAL_BATCH, WIDTH = 4, 12, 32
BIG, EVERY, LAST = "one big batch", "each micro-batch averages", "no_sync: forward and backward"
BACKWARD, FORWARD, ALL = "no_sync: backward only", "no_sync: forward only", "no_sync: the last too"
WAYS = (BIG, EVERY, LAST, BACKWARD, FORWARD, ALL)


def build(batch_norm: bool) -> nn.Sequential:
    """Three layers, (B, 32) -> (B, 10), in float64, so that equal means equal to 1e-10."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
    hidden = nn.Linear(WIDTH, WIDTH), norm, nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10)).double()


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    """Return the local batch of a rank: (12, 32) and (12,)."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(LOCAL_BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return images, torch.randint(10, (LOCAL_BATCH,), generator=generator)


def flat_gradients(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def accumulate(model: nn.Module, images: Tensor, labels: Tensor, k: int, divisor: int) -> Tensor:
    """The gradient of a batch in k micro-batches, without ranks.

    Each loss is divided by divisor. With k, the result is the mean: all parts have the same size.
    """
    model.zero_grad()
    for x, y in zip(images.chunk(k), labels.chunk(k), strict=True):
        (F.cross_entropy(model(x), y) / divisor).backward()  # adds to the gradients
    return flat_gradients(model)


def count_buckets(ddp: DistributedDataParallel) -> list[int]:
    """A list that grows with each bucket that is all-reduced from now on: the bytes of each."""
    sizes: list[int] = []

    def hook(group: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)  # type: ignore[arg-type]

    ddp.register_comm_hook(None, hook)
    return sizes


def step(ddp: DistributedDataParallel, way: str, images: Tensor, labels: Tensor) -> Tensor:
    """Return this rank's gradient after one step in one of the ways."""
    k = 1 if way == BIG else MICRO_BATCHES
    ddp.zero_grad()
    for part, (x, y) in enumerate(zip(images.chunk(k), labels.chunk(k), strict=True), start=1):
        early = part < k  # every micro-batch but the last
        quiet_forward = way == ALL or (early and way in (LAST, FORWARD))
        quiet_backward = way == ALL or (early and way in (LAST, BACKWARD))
        with ddp.no_sync() if quiet_forward else nullcontext():
            loss = F.cross_entropy(ddp(x), y) / k
        with ddp.no_sync() if quiet_backward else nullcontext():
            loss.backward()
    return flat_gradients(ddp)


def almost_equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-10)


def compare_with_one_process(gradients: Tensor, expected: Tensor) -> str:
    """Say whether the ranks agree, and whether they have the gradients of one process."""
    rows = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, gradients)  # every rank must reach this line
    if not all(torch.equal(row, rows[0]) for row in rows):
        return "differs from rank to rank"
    return "equals one process" if almost_equal(gradients, expected) else "differs"


def compare_ways() -> list[tuple[str, int, str]]:
    """Each way, its all-reduces per step, and its gradient. DDP first lays out its buckets."""
    images, labels = batch_of(dist.get_rank())
    all_images, all_labels = zip(*map(batch_of, range(dist.get_world_size())), strict=True)
    expected = accumulate(build(False), torch.cat(all_images), torch.cat(all_labels), 1, 1)
    rows = []
    for way in WAYS:
        # Small buckets, or this small model would have only one.
        ddp = DistributedDataParallel(build(False), bucket_cap_mb=0.005)
        sizes = count_buckets(ddp)
        step(ddp, BIG, images, labels)  # every rank must reach this line, and the next one
        sizes.clear()
        gradients = step(ddp, way, images, labels)
        verdict = compare_with_one_process(gradients, expected)
        rows.append((way, len(sizes), verdict))
    return rows


def compare_models() -> list[tuple[str, str]]:
    """Does the gradient of K micro-batches equal that of the whole batch, in one process?"""
    k = MICRO_BATCHES
    plain, norm = ("loss / K", False, k), ("loss / K, with BatchNorm", True, k)
    rows = []
    for name, batch_norm, divisor in (plain, ("loss not divided", False, 1), norm):
        model, batch = build(batch_norm), batch_of(0)
        expected = accumulate(model, *batch, 1, 1)
        verdicts = {"equals the whole batch": expected, "K times as large": k * expected}
        gradients = accumulate(model, *batch, k, divisor)
        matching = [text for text, value in verdicts.items() if almost_equal(gradients, value)]
        rows.append((name, matching[0] if matching else "differs"))
    return rows


def main() -> None:
    Parser(__doc__).parse_args()
    init_gloo_or_refuse("05_amp_syncbn/accumulate.py", "one rank has no other to average with")
    rows = compare_ways()
    if dist.get_rank() == 0:
        print(f"one process, {LOCAL_BATCH} samples in K = {MICRO_BATCHES} micro-batches\n")
        print(tabulate(compare_models(), ("", "gradient")))
        print(f"\n{dist.get_world_size()} ranks, each with {LOCAL_BATCH} samples\n")
        print(tabulate(rows, ("", "all-reduces per step", "gradient")))
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
