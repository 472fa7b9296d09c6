"""Stage 05: DDP in mixed precision, and BatchNorm over the global batch instead of the local one.

Run it from the root of the repository:

    torchrun --standalone --nproc-per-node=2 05_amp_syncbn/train.py --model net-bn --amp bf16
"""

import os
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DistributedSampler, Subset

from common.checkpoint import restore, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader, prepare_dataset
from common.models import build_model
from common.options import UsageError, cut_batch, make_parser, reseed, usage_errors_exit
from common.record import Recorder, peak_memory_bytes

from sync_batchnorm import convert

DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args() -> Namespace:
    parser = make_parser("05_amp_syncbn", __doc__)
    add, switch = parser.add_argument, BooleanOptionalAction  # type=bool takes "False" for True
    add("--amp", default="off", choices=tuple(DTYPES), help="dtype of forward and backward")
    add("--sync-bn", default=True, action=switch, help="BatchNorm over the global batch")
    return parser.parse_args()


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """GPU 0 for local rank 0, 1 for 1, and so on, from 0 again at the end; or the CPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none here: try --device cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def read_launcher() -> tuple[int, int, int, int]:
    """Rank, local rank, world size and ranks on this machine, as torchrun or srun tells them."""
    env = dict(os.environ)
    if "RANK" not in env and "SLURM_STEP_NUM_TASKS" in env:  # srun without torchrun
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"])
        env.update(WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
        per_node = env["SLURM_STEP_TASKS_PER_NODE"]  # as "4(x2)", or "4,3"
        env.update(LOCAL_WORLD_SIZE=per_node.split("(")[0].split(",")[0])
    elif "RANK" not in env:
        return 0, 0, 1, 1  # started as `python train.py`: a world of one
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    numbers = needed if env.get("WORLD_SIZE") == "1" else (*needed, "MASTER_PORT")
    wrong = [name for name in numbers if not env.get(name, "").isdecimal()]
    wrong += ["MASTER_ADDR"] if numbers != needed and not env.get("MASTER_ADDR") else []
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} in the environment is missing or no number: start with torchrun, "
            "or export it (MASTER_ADDR: the host of rank 0, MASTER_PORT: a free port there)"
        )
    rank, local_rank, world_size, local_world_size = (int(env[name]) for name in needed)
    if rank >= world_size:
        raise UsageError(f"RANK {rank} is not below WORLD_SIZE {world_size}: ranks count from 0")
    return rank, local_rank, world_size, local_world_size


def init_distributed(wanted: str) -> torch.device:
    """Join the process group of all ranks; returns the device of this one."""
    rank, local_rank, world_size, local_world_size = read_launcher()
    device = pick_device(wanted, local_rank)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if local_world_size <= torch.cuda.device_count():
            backend = "nccl"
        elif rank == 0:
            print(f"{local_world_size} ranks, {torch.cuda.device_count()} GPUs: gloo, not nccl")
    store = dist.HashStore() if world_size == 1 else None  # None: meet at MASTER_ADDR:MASTER_PORT
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (dist.DistError, ValueError) as error:  # ValueError: a port beyond 65,535
        raise UsageError(
            f"no meeting at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({error}): "
            "is the port free and rank 0 alive? try another MASTER_PORT, or torchrun --standalone"
        ) from error
    return device


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


def synchronize_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with BatchNorm over all ranks: torch's on a GPU, the one by hand elsewhere."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return convert(model)  # torch's refuses CPU tensors


def train_epoch(
    model: nn.Module,
    loader: Iterable,
    optimizer: Optimizer,
    device: torch.device,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype | None,
) -> Tensor:
    """One pass over the training set; returns the loss of every step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)  # the mean over the local batch
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # DDP averages the gradients meanwhile, bucket by bucket
        scaler.step(optimizer)  # divides by the scale; skips the step if a gradient is inf or nan
        scaler.update()  # halves the scale after a skipped step, doubles it after 2,000 good ones
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


def main() -> None:
    args = parse_args()
    device = init_distributed(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    with together(device):
        if rank == 0:
            prepare_dataset(args)  # one rank downloads, the others wait at the end of this block
    with together(device):
        local_batch = cut_batch(args.batch_size, world_size, "ranks")
        train_set, test_set = load_dataset(args)
        torch.manual_seed(args.seed)
        model = build_model(args.model, train_set).to(device)
        model = synchronize_batch_norm(model, device) if args.sync_bn else model  # before DDP
        optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
        scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
        start = restore(args, model, optimizer)
        if start.get("scaler"):  # empty unless that run used fp16
            scaler.load_state_dict(start["scaler"])
        recorder = Recorder(args, device, world_size, local_batch, start, enabled=rank == 0)
    # DDP sends rank 0's weights to all ranks, then watches every parameter for its gradient.
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    if args.evaluate:
        recorder.end_evaluation(*evaluate(model, test_set, local_batch, device))
        return

    if rank == 0:
        cut = f"{world_size} × {local_batch} (world size × local batch)"
        print(f"global batch {args.batch_size} = {cut}")
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # False repeats some
    loader = make_loader(train_set, local_batch, sampler, args.workers)
    dtype = DTYPES[args.amp]
    for epoch in recorder.epochs():
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        reseed(args.seed, epoch, rank)  # the dropout masks: different on every rank
        losses = train_epoch(ddp, recorder.watch(loader), optimizer, device, scaler, dtype)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_set, local_batch, device))
        if rank == 0:  # one writer; no collective hides in here
            save_checkpoint(recorder, model, optimizer, scaler=scaler.state_dict())
    recorder.finish(peak_memory_of_ranks(device))


if __name__ == "__main__":
    with usage_errors_exit():
        main()
    dist.destroy_process_group()
