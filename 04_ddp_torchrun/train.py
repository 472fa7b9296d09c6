"""Stage 04: torchrun starts the processes, DistributedDataParallel averages their gradients.

torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/train.py
"""

import os
from argparse import Namespace
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_dataset, loader_options, local_batch_size
from common.models import build_model
from common.options import UsageError, exit_on, make_parser
from common.record import Recorder


@exit_on(RuntimeError)  # a port in use, say, ends the run in one line
def join_process_group(args: Namespace) -> torch.device:
    """Meet the other ranks that torchrun has started; returns the device of this one."""
    if "LOCAL_RANK" not in os.environ:  # torchrun sets it: the number of this rank on its machine
        raise UsageError("start it with torchrun --standalone --nproc-per-node=2 SCRIPT")
    if args.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    # Local rank 0 takes GPU 0, 1 takes 1; if there are more ranks than GPUs, % begins again at 0.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)  # from here on, "cuda" means this GPU
    dist.init_process_group(args.backend)
    return device


def train_epoch(
    ddp: nn.Module, loader: Iterable, optimizer: SGD, device: torch.device, recorder: Recorder
) -> Tensor:
    """One pass over this rank's samples; returns each step's mean loss of all ranks, (steps,)."""
    ddp.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(ddp(images), labels)  # the mean over the local batch
        optimizer.zero_grad()
        loss.backward()  # place 1: meanwhile, DDP averages the gradients over the ranks
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


def main() -> None:
    parser = make_parser("04_ddp_torchrun", __doc__)
    parser.add_argument("--backend", default="nccl", choices=("gloo", "nccl"), help="for GPUs")
    args = parser.parse_args()
    # torchrun has set WORLD_SIZE. So a wrong call ends here, before the ranks connect.
    local_batch = local_batch_size(args.batch_size, int(os.environ.get("WORLD_SIZE", 1)))
    device = join_process_group(args)  # place 3: a GPU of its own
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, local_batch).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    progress = load_checkpoint(args, model, optimizer)
    # The lesson: wrap the model and train the wrapper, but evaluate and save the model inside it.
    ddp = DistributedDataParallel(model)  # sends rank 0's weights; averages in each backward
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # place 4: no repeats
    options = loader_options(args)  # worker processes, pinned memory
    loader = DataLoader(train_set, local_batch, sampler=sampler, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # place 2: no repeats
    test_loader = DataLoader(test_shard, local_batch, **options)
    recorder = Recorder(args, progress, optimizer, len(train_set), local_batch, rank, world_size)
    for epoch in range(progress.epoch, args.epochs):
        if progress.step >= args.max_steps:
            break
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        torch.manual_seed(args.seed + epoch * world_size + rank)  # place 5: its own dropout masks
        recorder.start_epoch(len(loader))
        losses = train_epoch(ddp, loader, optimizer, device, recorder)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_loader, device))
        if rank == 0:  # place 6: one writer; never a collective in here
            save_checkpoint(recorder, model, optimizer)
    recorder.finish()
    del ddp  # before the group: otherwise, the exit may hang (gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on(UsageError, dist.DistError):  # DistError: ranks did not meet, or two share a GPU
        main()
