"""Stage 03: processes train on a shard each and average their gradients by hand.

Run it from the root of the repository:

    python 03_ddp_manual_allreduce/train.py --world-size 2
"""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import RandomSampler, Subset

from common.checkpoint import restore, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader, prepare_dataset
from common.models import build_model
from common.options import UsageError, cut_batch, make_parser, number, usage_errors_exit
from common.record import Recorder, peak_memory_bytes

from partition import DataPartitioner
from reducers import REDUCERS


def parse_args() -> Namespace:
    parser = make_parser("03_ddp_manual_allreduce", __doc__)
    add = parser.add_argument
    add("--world-size", default=2, type=number(int, 1), metavar="N", help="processes to start")
    add("--backend", default="gloo", choices=("gloo", "nccl"), help="who carries the tensors")
    add("--reducer", choices=REDUCERS, help="average by reducers.py, not as in this file")
    args = parser.parse_args()
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    if args.backend == "nccl" and args.world_size > gpus:
        raise UsageError(
            f"--backend nccl needs a GPU for each of {args.world_size} ranks, here are {gpus}: "
            "try --backend gloo"
        )
    return args


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """GPU 0 for local rank 0, 1 for 1, and so on, from 0 again at the end; or the CPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none here: try --device cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """All ranks go on after this block, or none does; the lowest that failed tells why."""
    error = None
    try:
        yield
    except UsageError as caught:
        error = caught
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = torch.tensor(rank if error else world_size, device=device)  # the lowest that failed
    dist.all_reduce(first, dist.ReduceOp.MIN)  # every rank must reach this line
    if first < world_size:
        dist.destroy_process_group()
        raise error if error and first == rank else SystemExit(2)


def peak_memory_of_ranks(device: torch.device) -> list[int]:
    """The peak of each rank in bytes: each fills its own place, the sum has them all."""
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    peaks[dist.get_rank()] = peak_memory_bytes(device)
    dist.all_reduce(peaks)  # every rank must reach this line
    return peaks.tolist()


def average_gradients(model: nn.Module) -> None:
    """Give every rank the mean of all ranks' gradients: that of the global batch."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  # the sum; every rank must reach this line
            parameter.grad /= dist.get_world_size()


def choose_averaging(model: nn.Module, reducer: str | None) -> Callable[[], None]:
    """The function above; or, with --reducer, the same mean by other means."""
    return REDUCERS[reducer](model).finish if reducer else partial(average_gradients, model)


def train_epoch(
    model: nn.Module,
    loader: Iterable,
    optimizer: Optimizer,
    device: torch.device,
    average: Callable[[], None],
) -> Tensor:
    """One pass over the training set; returns the loss of every step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the local batch
        optimizer.zero_grad()
        loss.backward()
        average()  # the gradients of all ranks
        optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at every step
    mean = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean)  # once an epoch; every rank must reach this line
    return mean


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: ImageSet, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Mean loss and accuracy over the whole data set, each sample counted once."""
    model.eval()
    for buffer in model.buffers():  # BatchNorm's running statistics may differ: take rank 0's
        dist.broadcast(buffer, src=0)  # every rank must reach this line
    shard = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, samples
    for images, labels in make_loader(shard, batch_size):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)  # (B, classes)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)  # the last batch is smaller: weight by its own size
    dist.all_reduce(totals)  # sums, not means: shards may differ by a sample
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


def train(rank: int, args: Namespace, port: int) -> None:
    """What each process does."""
    device = pick_device(args.device, local_rank=rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # where the ranks meet
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, store=store, rank=rank, world_size=args.world_size)

    with together(device):
        local_batch = cut_batch(args.batch_size, args.world_size, "ranks")
        train_set, test_set = load_dataset(args)
        torch.manual_seed(args.seed)
        model = build_model(args.model, train_set, local_batch).to(device)
        optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
        start = restore(args, model, optimizer)
        recorder = Recorder(args, device, args.world_size, local_batch, start, enabled=rank == 0)
    for tensor in model.state_dict().values():  # all ranks start from rank 0's weights
        dist.broadcast(tensor, src=0)  # every rank must reach this line
    if args.evaluate:
        recorder.end_evaluation(*evaluate(model, test_set, local_batch, device))
        return

    with together(device):
        average = choose_averaging(model, args.reducer)
    if rank == 0:
        cut = f"{args.world_size} × {local_batch} (world size × local batch)"
        print(f"global batch {args.batch_size} = {cut}")
    sizes = [1 / args.world_size] * args.world_size
    shard = DataPartitioner(train_set, sizes, args.seed).use(rank)
    generator = torch.Generator()
    sampler = RandomSampler(shard, generator=generator)
    loader = make_loader(shard, local_batch, sampler, args.workers)
    for epoch in recorder.epochs():
        generator.manual_seed(args.seed + epoch)  # the order is a function of seed and epoch
        batches = recorder.watch(loader, rank)  # so are the dropout masks, different on every rank
        losses = train_epoch(model, batches, optimizer, device, average)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_set, local_batch, device))
        if rank == 0:  # one writer; no collective hides in here
            save_checkpoint(recorder, model, optimizer)
    recorder.finish(peak_memory_of_ranks(device))


def run(rank: int, args: Namespace, port: int) -> None:
    with usage_errors_exit():
        train(rank, args, port)
    dist.destroy_process_group()


def main() -> None:
    args = parse_args()
    pick_device(args.device, local_rank=0)  # what all ranks would refuse is refused here, once
    cut_batch(args.batch_size, args.world_size, "ranks")
    prepare_dataset(args)  # here, once, before there are ranks that could all download
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: or the ranks fight for cores
    # Port 0: the operating system picks a free one.
    store = dist.TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    # If a rank ends with an error, spawn kills the others; it need not log each of them.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        mp.spawn(run, args=(args, store.port), nprocs=args.world_size)
    except mp.ProcessExitedException as error:
        if error.exit_code != 2:
            raise
        sys.exit(2)  # a wrong call; a rank has told why


if __name__ == "__main__":
    with usage_errors_exit():
        main()
