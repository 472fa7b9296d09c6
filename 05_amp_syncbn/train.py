"""Stage 05: DDP as fast as the machine and as exact as one process: mixed precision, SyncBatchNorm.

Run it from the root of the repository:

    torchrun --standalone --nproc-per-node=2 05_amp_syncbn/train.py --model net-bn --amp bf16
"""

import math
import os
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler, Subset

from common.checkpoint import StopSignal, refuse_other_start, restore, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader, prepare_dataset
from common.models import build_model
from common.options import UsageError, cut_batch, make_parser, number, read_env, usage_errors_exit
from common.record import Recorder, peak_memory_bytes
from common.watchdog import Watchdog

from machine import refuse_format, refuse_no_compiler
from sync_batchnorm import convert

DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def parse_args() -> Namespace:
    parser = make_parser("05_amp_syncbn", __doc__)
    add, count = parser.add_argument, number(int, 1)
    add("--checkpoint-every-steps", type=count, metavar="N", help="besides each epoch's end")
    add("--timeout-seconds", default=600, type=number(int, 6), metavar="N", help="of late ranks")
    real, norm = number(float, 0, 1e38), number(float, 1e-30, 1e38)
    switch = BooleanOptionalAction  # type=bool would take "False" for True
    add("--amp", default="off", choices=tuple(DTYPES), help="dtype of forward and backward")
    add("--sync-bn", default=True, action=switch, help="BatchNorm over the global batch")
    add("--accumulate", default=1, type=count, metavar="K", help="micro-batches of a step")
    add("--clip-norm", type=norm, metavar="F", help="largest norm of all gradients together")
    add("--lr-rule", default="none", choices=("none", "linear", "sqrt"), help="for large batches")
    add("--base-batch-size", default=120, type=count, metavar="N", help="that --lr was tuned for")
    add("--warmup-epochs", default=0.0, type=real, metavar="F", help="with a rate that rises")
    add("--lr-decay", default="none", choices=("none", "step", "cosine"), help="after the warm-up")
    add("--channels-last", default=False, action=switch, help="store a pixel's channels together")
    add("--compile", default=False, action=switch, help="torch.compile; needs a C++ compiler")
    add("--comm-hook", default="none", choices=("none", *HOOKS), help="dtype of gradients sent")
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
    if "RANK" in os.environ:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    elif "SLURM_STEP_NUM_TASKS" in os.environ:  # srun without torchrun
        names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"]
        names += ["SLURM_STEP_TASKS_PER_NODE"]
    else:
        return 0, 0, 1, 1  # started as `python train.py`: a world of one
    rank, local_rank, world_size, local_world_size = read_env(*names)
    if rank >= world_size:
        raise UsageError(f"RANK {rank} is not below WORLD_SIZE {world_size}: ranks count from 0")
    if world_size > 1 and not 0 < (port := read_env("MASTER_PORT")[0]) < 2**16:
        raise UsageError(f"MASTER_PORT {port}: expected a free port on rank 0's host, as 29500")
    return rank, local_rank, world_size, local_world_size


def init_distributed(args: Namespace) -> tuple[torch.device, dist.Store]:
    """Join the process group of all ranks; returns this rank's device, and where they met."""
    rank, local_rank, world_size, local_world_size = read_launcher()
    device = pick_device(args.device, local_rank)
    one_machine = local_world_size == world_size
    if one_machine:  # gloo need not be open to the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend, wait = "gloo", timedelta(seconds=args.timeout_seconds)
    store: dist.Store = dist.HashStore()
    try:
        if world_size > 1:  # meet at MASTER_ADDR:MASTER_PORT
            store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=wait))
            # torchrun keeps the store when it restarts the ranks (pytorch issue 135712): leave out
            # what the dead wrote. Agents of several machines count restarts each for themselves.
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"
            store = dist.PrefixStore(restart, store)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            store.set(f"GPU {rank}", str(torch.cuda.get_device_properties(device).uuid))
            gpus = {store.get(f"GPU {other}") for other in range(world_size)}
            backend = "cpu:gloo,cuda:nccl" if len(gpus) == world_size else "gloo"
            if rank == 0 and backend == "gloo":
                print(f"{world_size} ranks, {len(gpus)} GPUs: gloo, not nccl")
        wait -= timedelta(seconds=4)  # who has waited in vain needs time to find out for whom
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=wait
        )
    except (dist.DistError, ValueError) as error:  # ValueError: no MASTER_ADDR
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UsageError(
            f"{world_size} ranks did not meet at {where} ({error}): is it rank 0's host, is the "
            "port free and open, are all ranks there? try another MASTER_PORT or --standalone"
        ) from error
    return device, store


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


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank: the same answer on all, so that all decide alike."""
    votes = torch.tensor(int(flag))  # on the CPU, where gloo carries it: no GPU has to wait
    dist.all_reduce(votes, dist.ReduceOp.MAX)  # every rank must reach this line
    return bool(votes)


def mean_of_ranks(losses: Tensor, model: nn.Module, recorder: Recorder) -> Tensor:
    """The mean of all ranks' losses, (steps,); a loss or weight that is nan or inf ends all."""
    parts = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, losses)  # every rank must reach this line
    with together(losses.device):
        recorder.refuse_nan(torch.stack(parts), model, dist.get_rank())  # (ranks, steps)
    return torch.stack(parts).mean(dim=0)


def wrap(model: nn.Module, image: Tensor, args: Namespace) -> DistributedDataParallel:
    """DDP: sends rank 0's weights to all ranks, then watches every parameter for its gradient.

    After its first backward it lays out its buckets anew, in the order of the gradients. With three
    ranks or more this changes how sums are rounded. One backward here, before the first step, and
    all steps have the same buckets: of a run that goes on, and of one that was never stopped.
    """
    ids = [image.device] if image.is_cuda else None
    # Gradients live in the buckets: no second copy of them, and no copying there and back.
    ddp = DistributedDataParallel(model, ids, gradient_as_bucket_view=True)
    ddp.eval()(image[None]).sum().backward()  # eval: leaves BatchNorm's statistics as they are
    model.zero_grad()
    if args.comm_hook != "none":
        ddp.register_comm_hook(None, HOOKS[args.comm_hook])
    if args.compile:
        ddp.compile()  # in place: `model` stays as it is, and no name gains an `_orig_mod.` prefix
    return ddp


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


def lr_factor(args: Namespace, steps_an_epoch: int, step: int) -> float:
    """What multiplies --lr in a step, counted from 0: rule of the batch, warm-up, decay."""
    growth = args.batch_size / args.base_batch_size
    factor = {"none": 1.0, "linear": growth, "sqrt": growth**0.5}[args.lr_rule]
    warm_up, end = args.warmup_epochs * steps_an_epoch, args.epochs * steps_an_epoch
    if step < warm_up:
        return factor * min(1.0, (step + 1) / warm_up)
    done = min(1.0, (step - warm_up) / max(1.0, end - warm_up))  # from 0 to 1
    if args.lr_decay == "step":
        factor *= 0.1 ** int(3 * done)  # a tenth after each third
    elif args.lr_decay == "cosine":
        factor *= (1 + math.cos(math.pi * done)) / 2
    return factor


def finish_step(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    schedule: LambdaLR,
    clip_norm: float | None,
) -> None:
    """What follows backward, in the only right order: unscale, clip, step, update, schedule."""
    if clip_norm is not None:
        scaler.unscale_(optimizer)  # the limit is one of gradients, not of scaled ones
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)  # of the mean: alike on all ranks
    scale = scaler.get_scale()
    scaler.step(optimizer)  # unscales if nobody has; skips the step if a gradient is inf or nan
    scaler.update()  # halves the scale after a skipped step, doubles it after 2,000 good ones
    if scaler.get_scale() >= scale:  # a skipped step does not count
        schedule.step()
    elif scale < 2**-24:  # no smaller one will help; on all ranks alike, as their gradients are
        raise UsageError(
            f"--amp fp16: gradients are inf or nan even with the loss scaled by {scale:.0e}, and "
            "no step is taken: try --amp bf16, or a lower --lr with --resume auto"
        )


def train_epoch(
    model: DistributedDataParallel,
    loader: Iterable,
    optimizer: Optimizer,
    device: torch.device,
    scaler: torch.amp.GradScaler,
    schedule: LambdaLR,
    args: Namespace,
) -> Tensor:
    """One pass over the training set; returns the loss of every step, (steps,), on the device."""
    model.train()
    losses = []
    layout = torch.channels_last if args.channels_last else torch.preserve_format
    for images, labels in loader:
        images = images.to(device, non_blocking=True, memory_format=layout)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        optimizer.zero_grad()
        parts = []  # the loss of every micro-batch
        for x, y in zip(images.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True):
            last = len(parts) == args.accumulate - 1
            with nullcontext() if last else model.no_sync():  # DDP decides in forward
                with torch.autocast(device.type, DTYPES[args.amp], enabled=args.amp != "off"):
                    loss = F.cross_entropy(model(x), y) / args.accumulate
                scaler.scale(loss).backward()  # adds; the last averages over the ranks, by buckets
            parts.append(loss.detach())
        finish_step(model, optimizer, scaler, schedule, args.clip_norm)
        losses.append(sum(parts))  # .item() would make the CPU wait for the GPU at every step
    return torch.stack(losses)


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


def prepare(args: Namespace, device: torch.device, train_set: ImageSet) -> tuple[nn.Module, int]:
    """The model as it will train, not wrapped yet, and the local batch."""
    if args.amp != "off":
        refuse_format(args.amp, device)
    if args.compile:
        refuse_no_compiler(device)
    world_size = dist.get_world_size()
    parts = f"parts ({world_size} ranks × --accumulate {args.accumulate})"
    micro_batch = cut_batch(args.batch_size, world_size * args.accumulate, parts)
    torch.manual_seed(args.seed)
    seen = micro_batch * world_size if args.sync_bn else micro_batch  # by BatchNorm, at once
    model = build_model(args.model, train_set, seen).to(device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if args.sync_bn:  # before DDP
        model = synchronize_batch_norm(model, device)
    return model, micro_batch * args.accumulate


def train(args: Namespace, device: torch.device, watchdog: Watchdog) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with together(device):
        train_set, test_set = load_dataset(args)
        model, local_batch = prepare(args, device, train_set)
        optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
        scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
        start = restore(args, model, optimizer)
        scaler.load_state_dict(start.get("scaler") or scaler.state_dict())  # if that run had one
        recorder = Recorder(args, device, world_size, local_batch, start, enabled=rank == 0)
    step = torch.tensor(start["step"])
    dist.broadcast(step, src=0)  # every rank must reach this line
    with together(device):
        refuse_other_start(start, int(step))  # --run-dir may be another disk on each machine
    ddp = wrap(model, train_set[0][0].to(device), args)
    if args.evaluate:
        recorder.end_evaluation(*evaluate(model, test_set, local_batch, device))
        return
    if rank == 0:
        cut = f"{world_size} × {args.accumulate} × {local_batch // args.accumulate}"
        print(f"global batch {args.batch_size} = {cut} (world size × accumulate × micro-batch)")
    stop, watchdog.position = StopSignal(), recorder.position
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # False repeats some
    loader = make_loader(train_set, local_batch, sampler, args.workers)
    was = start.get("options", vars(args))["batch_size"]  # the place in the schedule, in samples
    taken = round(start.get("taken", start["step"]) * was / args.batch_size)  # without skipped ones
    schedule = LambdaLR(optimizer, partial(lr_factor, args, len(loader)), last_epoch=taken - 1)
    for epoch in recorder.epochs():  # the same epoch again, if a checkpoint has cut it
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        batches = recorder.watch(loader, rank, lambda: any_rank(stop.asked))  # one stops, all stop
        losses = train_epoch(ddp, batches, optimizer, device, scaler, schedule, args)
        losses = mean_of_ranks(losses, model, recorder)
        if recorder.inside_epoch():
            recorder.write(epoch, losses)
        else:
            recorder.end_epoch(epoch, losses, *evaluate(model, test_set, local_batch, device))
        if rank == 0:  # one writer; no collective hides in here
            more = {"scaler": scaler.state_dict(), "taken": schedule.last_epoch}
            save_checkpoint(recorder, model, optimizer, **more)
    recorder.finish(peak_memory_of_ranks(device))


def main() -> None:
    args = parse_args()
    device, store = init_distributed(args)
    with Watchdog(store.clone(), dist.get_rank(), dist.get_world_size(), __file__) as watchdog:
        with together(device):
            if dist.get_rank() == 0:
                prepare_dataset(args)  # one rank downloads, the others wait at the block's end
        train(args, device, watchdog)
    dist.destroy_process_group()


if __name__ == "__main__":
    with usage_errors_exit():
        main()
