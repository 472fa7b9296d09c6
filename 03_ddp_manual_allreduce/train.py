"""Stage 03: each process trains on its part of each batch; they average their gradients by hand.

python 03_ddp_manual_allreduce/train.py --world-size 2
"""

import os
import signal
from argparse import Namespace
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Subset

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_dataset, loader_options, local_batch_size
from common.models import build_model
from common.options import UsageError, exit_on, int_at_least, make_parser
from common.record import Recorder
from partition import DataPartitioner


def average_gradients(model: nn.Module) -> None:
    """Give each rank the mean of all ranks' gradients: the gradient of the global batch."""
    for parameter in model.parameters():
        if parameter.grad is not None:  # either every rank has this gradient, or none
            dist.all_reduce(parameter.grad)  # the sum; all ranks have the parameters in one order
            parameter.grad /= dist.get_world_size()


def train_epoch(
    model: nn.Module, loader: Iterable, optimizer: SGD, device: torch.device, recorder: Recorder
) -> Tensor:
    """One pass over this rank's samples; returns each step's mean loss of all ranks, (steps,)."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the local batch
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)  # place 1: the gradient of the global batch
        optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at each step
        if recorder.step(loss):  # counts and times it; true at --max-steps
            break
    epoch_losses = torch.stack(losses)
    dist.all_reduce(epoch_losses)  # once per epoch, because each message costs time
    return epoch_losses / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over the test set, each sample counted once."""
    model.eval()
    for buffer in model.buffers():  # BatchNorm's running statistics may differ, so use rank 0's
        dist.broadcast(buffer, src=0)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)  # (B, classes)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)  # the last batch is smaller, so it counts by its own size
    dist.all_reduce(totals)  # place 2: sums and counts, as the shards may differ by a sample
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


@exit_on(UsageError)
def train(rank: int, world_size: int, port: int, local_batch: int, args: Namespace) -> None:
    """What each process does, from meeting the others to the last epoch."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so this process ends if its parent is killed
    device = torch.device("cpu")
    if args.device == "cuda":  # place 3: GPU 0 for rank 0, GPU 1 for rank 1, and so on
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # where the ranks meet
    dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size)

    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, local_batch).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    progress = load_checkpoint(args, model, optimizer)

    for tensor in model.state_dict().values():  # all ranks start from rank 0's weights
        dist.broadcast(tensor, src=0)
    options = loader_options(args)  # worker processes, pinned memory
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # place 2: no repeats
    test_loader = DataLoader(test_shard, local_batch, **options)
    recorder = Recorder(args, progress, optimizer, len(train_set), local_batch, rank, world_size)
    for epoch in range(progress.epoch, args.epochs):
        if progress.step >= args.max_steps:
            break
        # Place 4: stage 01's order, dealt out in turn. Together, the ranks have its very batches.
        shard = DataPartitioner(train_set, world_size, args.seed + epoch).use(rank)
        loader = DataLoader(shard, local_batch, drop_last=True, **options)
        torch.manual_seed(args.seed + epoch * world_size + rank)  # place 5: its own dropout masks
        recorder.start_epoch(len(loader))
        losses = train_epoch(model, loader, optimizer, device, recorder)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_loader, device))
        if rank == 0:  # place 6: one writer; never a collective in here
            save_checkpoint(recorder, model, optimizer)
    recorder.finish()
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser("03_ddp_manual_allreduce", __doc__)
    parser.add_argument("--world-size", default=2, type=int_at_least(1), help="processes to start")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"), help="nccl: GPUs")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.backend == "nccl" and gpus < args.world_size:
        raise UsageError("--backend nccl needs a GPU for each rank: try --backend gloo")
    local_batch = local_batch_size(args.batch_size, args.world_size)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for each rank, read as it starts
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
    mp.spawn(train, (args.world_size, store.port, local_batch, args), nprocs=args.world_size)


if __name__ == "__main__":
    with exit_on(UsageError, mp.ProcessExitedException):  # a failed rank has printed its reason
        main()
