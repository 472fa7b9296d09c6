"""Stage 05: mixed precision, and BatchNorm over the global batch, as in one process.

torchrun --standalone --nproc-per-node=2 05_amp_syncbn/train.py --model net-bn --amp bf16
"""

import os
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable
from contextlib import nullcontext
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
from common.options import UsageError, cut_batch, make_parser, number, usage_errors_exit
from common.record import Recorder, peak_memory_bytes
from schedule import add_schedule, learning_rates
from sync_batchnorm import convert

DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


def parse_args() -> Namespace:
    parser = make_parser("05_amp_syncbn", __doc__)
    add, switch = parser.add_argument, BooleanOptionalAction  # type=bool: "False" would be True
    add("--amp", default="off", choices=tuple(DTYPES), help="dtype of forward and backward")
    add("--sync-bn", default=True, action=switch, help="BatchNorm over the global batch")
    add("--accumulate", default=1, type=number(int, 1), help="micro-batches per optimizer step")
    add("--clip-norm", type=number(float, 1e-30), help="upper limit for the norm of all gradients")
    add_schedule(parser)  # --lr-rule, --base-batch-size, --warmup-epochs, --lr-decay
    return parser.parse_args()


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


def train_epoch(
    model: DistributedDataParallel,
    loader: Iterable,
    rates: list[float],
    optimizer: SGD,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    args: Namespace,
) -> Tensor:
    """One pass over the training set; returns the loss of each step, (steps,), on the device."""
    model.train()
    losses = []
    for (images, labels), lr in zip(loader, rates, strict=False):
        optimizer.param_groups[0]["lr"] = lr  # all parameters are in one group
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        optimizer.zero_grad()
        parts = []  # the loss of each micro-batch
        for x, y in zip(images.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True):
            last = len(parts) == args.accumulate - 1
            sync = nullcontext() if last else model.no_sync()  # DDP decides in forward
            with torch.autocast(device.type, DTYPES[args.amp], enabled=args.amp != "off"), sync:
                loss = F.cross_entropy(model(x), y) / args.accumulate
            scaler.scale(loss).backward()  # adds to .grad; the last one averages over the ranks
            parts.append(loss.detach())
        if args.clip_norm:
            scaler.unscale_(optimizer)  # the limit is meant for the gradients, not for scaled ones
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        scaler.step(optimizer)  # with fp16: skips the step if a gradient is inf or nan
        scaler.update()
        losses.append(sum(parts))  # .item() would make the CPU wait for the GPU at each step
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
    args = parse_args()
    rank, local_rank, world_size, local_ranks = read_launcher()
    device = torch.device("cpu")
    if args.device == "cuda":  # GPU 0 for local rank 0, 1 for 1, and so on
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    local_batch = cut_batch(args.batch_size, world_size * args.accumulate) * args.accumulate
    norm_batch = (args.batch_size if args.sync_bn else local_batch) // args.accumulate
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, norm_batch).to(device)
    if args.sync_bn:  # before DDP; torch's own layer refuses CPU tensors, the one by hand does not
        gpu = device.type == "cuda"
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if gpu else convert(model)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    saved = load_checkpoint(args, model, optimizer)
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # stages 01 to 04 have none
    recorder = Recorder(args, optimizer, saved, local_batch, rank, world_size)
    init_distributed(device, rank, world_size, local_ranks)  # every rank must reach this line
    if args.evaluate:
        return recorder.end_evaluation(*evaluate(model, test_set, local_batch, device))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy is kept
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # else: repeats samples
    loader = make_loader(train_set, local_batch, sampler, args.workers)
    for epoch in range(saved["epoch"], args.epochs):
        if recorder.step >= args.max_steps:
            break
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        torch.manual_seed(args.seed + epoch * world_size + rank)  # each rank its own dropout masks
        rates = learning_rates(args, epoch, len(loader))
        batches = recorder.timed(islice(loader, args.max_steps - recorder.step), len(loader))
        losses = train_epoch(ddp, batches, rates, optimizer, scaler, device, args)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_set, local_batch, device))
        if rank == 0:  # one writer; no collective may hide in here
            save_checkpoint(recorder, model, optimizer, scaler=scaler.state_dict())
    peaks = [0] * world_size
    dist.all_gather_object(peaks, peak_memory_bytes(device))  # every rank must reach this line
    recorder.finish(device, peaks)


if __name__ == "__main__":
    with usage_errors_exit(dist.DistNetworkError, dist.DistStoreError):  # the ranks did not meet
        main()
        dist.destroy_process_group()
