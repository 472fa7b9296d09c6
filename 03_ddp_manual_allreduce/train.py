"""Stage 03: each process trains on its shard of the data; they average their gradients by hand.

python 03_ddp_manual_allreduce/train.py --world-size 2
"""

import os
import signal
from argparse import Namespace
from collections.abc import Iterable
from itertools import islice

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import RandomSampler, Subset

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader
from common.models import build_model
from common.options import UsageError, cut_batch, make_parser, number, usage_errors_exit
from common.record import Recorder, peak_memory_bytes
from partition import DataPartitioner


def average_gradients(model: nn.Module) -> None:
    """Give each rank the mean of all ranks' gradients: the gradient of the global batch."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  # the sum; every rank must reach this line
            parameter.grad /= dist.get_world_size()


def train_epoch(model: nn.Module, loader: Iterable, optimizer: SGD, device: torch.device) -> Tensor:
    """One pass over the training set; returns the loss of each step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the local batch
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at each step
    mean = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean)  # once per epoch; every rank must reach this line
    return mean


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: ImageSet, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Mean loss and accuracy over the whole data set, each sample counted once."""
    model.eval()
    for buffer in model.buffers():  # BatchNorm's running statistics may differ: use rank 0's
        dist.broadcast(buffer, src=0)  # every rank must reach this line
    shard = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, samples
    for images, labels in make_loader(shard, batch_size, workers=dataset.workers):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)  # (B, classes)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)  # the last batch is smaller: weight by its own size
    dist.all_reduce(totals)  # sums: shards may differ by a sample; every rank must reach this line
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


@usage_errors_exit()
def train(rank: int, args: Namespace, local_batch: int, port: int) -> None:
    """What each process does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # sent when main() is killed; `&` would ignore it
    world_size, device = args.world_size, torch.device("cpu")
    if args.device == "cuda":  # GPU 0 for local rank 0, 1 for 1, and so on
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, local_batch).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    saved = load_checkpoint(args, model, optimizer)
    recorder = Recorder(args, optimizer, saved, local_batch, rank, world_size)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # where the ranks meet
    dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size)
    if args.evaluate:
        return recorder.end_evaluation(*evaluate(model, test_set, local_batch, device))

    for tensor in model.state_dict().values():  # all ranks start from rank 0's weights
        dist.broadcast(tensor, src=0)  # every rank must reach this line
    shard = DataPartitioner(train_set, [1 / world_size] * world_size, args.seed).use(rank)
    generator = torch.Generator()
    sampler = RandomSampler(shard, generator=generator)
    loader = make_loader(shard, local_batch, sampler, args.workers)
    for epoch in range(saved["epoch"], args.epochs):
        if recorder.step >= args.max_steps:
            break
        generator.manual_seed(args.seed + epoch)  # the order is a function of (seed, epoch)
        torch.manual_seed(args.seed + epoch * world_size + rank)  # each rank its own dropout masks
        batches = recorder.timed(islice(loader, args.max_steps - recorder.step), len(loader))
        losses = train_epoch(model, batches, optimizer, device)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_set, local_batch, device))
        if rank == 0:  # one writer; no collective may hide in here
            save_checkpoint(recorder, model, optimizer)
    peaks = [0] * world_size
    dist.all_gather_object(peaks, peak_memory_bytes(device))  # every rank must reach this line
    recorder.finish(device, peaks)
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser("03_ddp_manual_allreduce", __doc__)
    parser.add_argument("--world-size", default=2, type=number(int, 1), help="processes to start")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"), help="nccl: GPUs")
    args = parser.parse_args()
    if args.backend == "nccl" and args.world_size > torch.cuda.device_count():
        raise UsageError("--backend nccl needs a GPU for each rank: try --backend gloo")
    local_batch = cut_batch(args.batch_size, args.world_size)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: or the ranks fight for cores
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
    try:  # if one rank fails, spawn ends the others
        mp.spawn(train, args=(args, local_batch, store.port), nprocs=args.world_size)
    except mp.ProcessExitedException as error:  # below 0: a signal killed it, so say which
        raise SystemExit(error.exit_code if error.exit_code > 0 else str(error)) from None


if __name__ == "__main__":
    with usage_errors_exit():
        main()
