"""Stage 04: torchrun starts the processes, DistributedDataParallel averages their gradients.

torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/train.py
"""

import os
from collections.abc import Iterable
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DistributedSampler, Subset

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader
from common.models import build_model
from common.options import UsageError, cut_batch, make_parser, usage_errors_exit
from common.record import Recorder, peak_memory_bytes

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


def read_launcher() -> list[int]:
    """Rank, local rank, world size, local world size: from torchrun, else srun, else alone."""
    for names in (TORCHRUN, SRUN):
        if os.environ.get(names[2], "1") != "1":
            if missing := {*names, "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
                raise UsageError(f"{min(missing)} is not set: start with torchrun, or export it")
            return [int(os.environ[name].split("(")[0].split(",")[0]) for name in names]  # "2(x3)"
    return [0, 0, 1, 1]  # started as `python train.py`: a world of one


def init_distributed(device: torch.device, rank: int, world_size: int, local_ranks: int) -> None:
    """Join the process group: nccl if each rank has a GPU of its own, else gloo."""
    nccl = device.type == "cuda" and torch.cuda.device_count() >= local_ranks
    if rank == 0 and device.type == "cuda" and not nccl:
        print(f"{local_ranks} ranks share {torch.cuda.device_count()} GPUs: gloo, not nccl")
    backend, gpu = ("nccl", device) if nccl else ("gloo", None)
    store = dist.HashStore() if world_size == 1 else None  # None: meet at MASTER_ADDR:MASTER_PORT
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store, device_id=gpu)


def train_epoch(model: nn.Module, loader: Iterable, optimizer: SGD, device: torch.device) -> Tensor:
    """One pass over the training set; returns the loss of each step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the local batch
        optimizer.zero_grad()
        loss.backward()  # meanwhile, DDP averages the gradients bucket by bucket
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


def main() -> None:
    args = make_parser("04_ddp_torchrun", __doc__).parse_args()
    rank, local_rank, world_size, local_ranks = read_launcher()
    device = torch.device("cpu")
    if args.device == "cuda":  # GPU 0 for local rank 0, 1 for 1, and so on
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    local_batch = cut_batch(args.batch_size, world_size)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, local_batch).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    saved = load_checkpoint(args, model, optimizer)
    recorder = Recorder(args, optimizer, saved, local_batch, rank, world_size)
    init_distributed(device, rank, world_size, local_ranks)  # every rank must reach this line
    if args.evaluate:
        return recorder.end_evaluation(*evaluate(model, test_set, local_batch, device))

    ddp = DistributedDataParallel(model)  # rank 0's weights now, mean gradients in each backward
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # else: repeats samples
    loader = make_loader(train_set, local_batch, sampler, args.workers)
    for epoch in range(saved["epoch"], args.epochs):
        if recorder.step >= args.max_steps:
            break
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        torch.manual_seed(args.seed + epoch * world_size + rank)  # each rank its own dropout masks
        batches = recorder.timed(islice(loader, args.max_steps - recorder.step), len(loader))
        losses = train_epoch(ddp, batches, optimizer, device)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_set, local_batch, device))
        if rank == 0:  # one writer; no collective may hide in here
            save_checkpoint(recorder, model, optimizer)
    peaks = [0] * world_size
    dist.all_gather_object(peaks, peak_memory_bytes(device))  # every rank must reach this line
    recorder.finish(device, peaks)


if __name__ == "__main__":
    with usage_errors_exit(dist.DistNetworkError, dist.DistStoreError):  # the ranks did not meet
        main()
        dist.destroy_process_group()
