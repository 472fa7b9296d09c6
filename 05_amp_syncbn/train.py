"""Stage 05: mixed precision (lesson 1, in the loop) and SyncBatchNorm (lesson 2, in main).

torchrun --standalone --nproc-per-node=2 05_amp_syncbn/train.py --model net-bn --amp bf16
"""

import os
from argparse import BooleanOptionalAction, Namespace
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
from sync_batchnorm import convert_sync_batchnorm

AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    ddp: nn.Module,
    loader: Iterable,
    optimizer: SGD,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    recorder: Recorder,
) -> Tensor:
    """One pass over this rank's samples; returns each step's mean loss of all ranks, (steps,)."""
    dtype = AMP_DTYPES[recorder.args.amp]  # None: autocast stays off
    ddp.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        # Lesson 1: in this context, convolutions and matrix products run in 16 bits.
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(ddp(images), labels)  # the mean over the local batch
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # scaled up, because fp16 rounds small gradients to 0
        scaler.step(optimizer)  # scaled back; a step with inf or nan is skipped
        scaler.update()  # chooses the next scale
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
    parser = make_parser("05_amp_syncbn", __doc__)
    parser.add_argument("--amp", default="off", choices=AMP_DTYPES, help="dtype of forward")
    parser.add_argument(
        "--sync-bn", default=True, action=BooleanOptionalAction, help="BatchNorm over all ranks"
    )
    parser.add_argument("--backend", default="nccl", choices=("gloo", "nccl"), help="for GPUs")
    args = parser.parse_args()
    # torchrun has set WORLD_SIZE. So a wrong call ends here, before the ranks connect.
    local_batch = local_batch_size(args.batch_size, int(os.environ.get("WORLD_SIZE", 1)))
    device = join_process_group(args)  # place 3: a GPU of its own
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    batchnorm_batch = args.batch_size if args.sync_bn else local_batch
    model = build_model(args.model, train_set, batchnorm_batch).to(device)
    # Lesson 2: in training, BatchNorm sees the global batch.
    if args.sync_bn:  # PyTorch's own layer refuses to train on a CPU, so there, ours does
        if args.device == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        else:
            model = convert_sync_batchnorm(model)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")  # bf16 needs none
    progress = load_checkpoint(args, model, optimizer, scaler=scaler)

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
        losses = train_epoch(ddp, loader, optimizer, scaler, device, recorder)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_loader, device))  # in fp32
        if rank == 0:  # place 6: one writer; never a collective in here
            save_checkpoint(recorder, model, optimizer, scaler=scaler)
    recorder.finish()
    del ddp  # before the group: otherwise, the exit may hang (gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on(UsageError, dist.DistError):  # DistError: ranks did not meet, or two share a GPU
        main()
