"""Stage 05 and all that keeps a run alive: it stops, resumes and fails on all ranks alike.

torchrun --standalone --nproc-per-node=2 beyond/survive/train.py --resume auto
"""

from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DistributedSampler, Subset

import durable
import local_ranks.chapters  # noqa: F401, it lets this import the chapters of stage 05
from agree import Agreement, AgreementError
from common.checkpoint import checkpoint_state, read_checkpoint
from common.data import ImageSet, load_dataset, loader_options, local_batch_size
from common.models import build_model
from common.options import UsageError, exit_on, float_at_least, int_at_least, make_parser
from common.record import Progress, Recorder
from launch import LaunchError, join_process_group, read_launcher
from rank_loader import RankLoader
from schedule import add_schedule, learning_rates
from sync_batchnorm import convert_sync_batchnorm
from watchdog import Watchdog

AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args() -> Namespace:
    parser = make_parser("survive", __doc__)
    add = parser.add_argument
    count = int_at_least(1)
    add("--amp", default="off", choices=AMP_DTYPES, help="dtype of forward")
    add("--sync-bn", default=True, action=BooleanOptionalAction, help="BatchNorm over all ranks")
    add("--accumulate", default=1, type=count, help="micro-batches per optimizer step")
    add("--clip-norm", type=float_at_least(1e-30), help="upper limit for the norm of all gradients")
    add_schedule(parser)  # --lr-rule, --base-batch-size, --warmup-epochs, --lr-decay
    add("--checkpoint-every-steps", type=count, help="besides the end of each epoch")
    limit = int_at_least(1, below=10**9)  # torch counts in nanoseconds, in 63 bits
    add("--timeout-seconds", default=600, type=limit, help="time to wait for a missing rank")
    return parser.parse_args()


def find_checkpoint(args: Namespace) -> Path | None:
    """Return what --resume names; with auto, this run's newest checkpoint that is whole."""
    if args.resume is None:
        return None
    if args.resume == "auto":
        return durable.newest_whole(args.run_dir / "checkpoint.pt")
    path = Path(args.resume)
    if durable.is_whole(path):
        return path
    raise durable.CheckpointError(f"{path} is missing, damaged or no checkpoint: name another")


def resume(
    args: Namespace,
    path: Path,
    samples: int,
    model: nn.Module,
    optimizer: SGD,
    scaler: torch.amp.GradScaler,
) -> tuple[Progress, int]:
    """Load this checkpoint; returns how far its run had come, and on how many ranks.

    samples: of the training set.
    """
    progress, saved = read_checkpoint(path, args, model, optimizer, scaler=scaler)
    stage, seed, batch = [saved[key] for key in ("stage", "seed", "global_batch")]
    count = saved.get("train_samples", samples)  # older checkpoints do not hold it
    if progress.epoch_step and (seed, batch, count) != (args.seed, args.batch_size, samples):
        why = f"ends inside an epoch of {stage} over {count} samples (here: {samples})"
        flags = f"--seed {seed} --batch-size {batch}"
        raise durable.CheckpointError(f"{path} {why} with {flags}: use the same")
    return progress, saved["world_size"]


def batches_until_save(loader: Iterable, recorder: Recorder, agreement: Agreement) -> Iterator:
    """Yield batches until the end of the epoch, the next checkpoint, or the step where all stop."""
    args, progress = recorder.args, recorder.progress
    for batch in loader:
        # Dropout masks are a function of the step, so a resumed run draws the same ones.
        durable.reseed(args.seed, progress.epoch, progress.epoch_step, agreement.rank)
        yield batch  # the training step runs while this line waits
        all_stop = agreement.vote()  # it does not wait for the other ranks
        is_due = args.checkpoint_every_steps and progress.step % args.checkpoint_every_steps == 0
        if all_stop or is_due or progress.step >= args.max_steps:
            break
    agreement.barrier()  # the recorder waits for the GPU next


def train_epoch(
    ddp: DistributedDataParallel,
    loader: Iterable,
    rates: list[float],
    optimizer: SGD,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    recorder: Recorder,
) -> Tensor:
    """Train on this rank's batches, in micro-batches; returns its own loss of each step, (steps,).

    loader: the rest of the epoch, at most to the next checkpoint. rates: each step's learning rate.
    """
    args = recorder.args
    autocast = torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "off")
    ddp.train()
    losses = []
    for (images, labels), lr in zip(loader, rates, strict=False):
        optimizer.param_groups[0]["lr"] = lr  # all parameters are in one group
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        optimizer.zero_grad()
        parts = []  # the loss of each micro-batch
        for x, y in zip(images.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True):
            is_last = len(parts) == args.accumulate - 1
            context = nullcontext() if is_last else ddp.no_sync()  # DDP decides in forward
            with context, autocast:
                loss = F.cross_entropy(ddp(x), y) / args.accumulate
            scaler.scale(loss).backward()  # adds to .grad; the last one averages over the ranks
            parts.append(loss.detach())
        if args.clip_norm:
            scaler.unscale_(optimizer)  # the limit is meant for the gradients, not for scaled ones
            nn.utils.clip_grad_norm_(ddp.parameters(), args.clip_norm)
        scaler.step(optimizer)  # with fp16: skips the step if a gradient is inf or nan
        scaler.update()
        losses.append(sum(parts))  # .item() would make the CPU wait for the GPU at each step
        recorder.step(losses[-1])  # counts and times it
    return torch.stack(losses)


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


class PreparedRun(NamedTuple):
    """What one rank trains or evaluates with."""

    train_set: ImageSet
    test_set: ImageSet
    local_batch: int
    model: nn.Module
    optimizer: SGD
    scaler: torch.amp.GradScaler
    recorder: Recorder


def prepare(args: Namespace, device: torch.device, rank: int, world_size: int) -> PreparedRun:
    """Do, and check, what one rank can do alone."""
    path = find_checkpoint(args)
    micro_batch = local_batch_size(args.batch_size, world_size * args.accumulate)
    batchnorm_batch = micro_batch * world_size if args.sync_bn else micro_batch
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, batchnorm_batch).to(device)
    if args.sync_bn:  # PyTorch's own layer refuses to train on a CPU, so there, ours does
        if args.device == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        else:
            model = convert_sync_batchnorm(model)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    progress, ranks, samples = Progress(), 0, len(train_set)
    if path:
        progress, ranks = resume(args, path, samples, model, optimizer, scaler)
    local_batch = args.accumulate * micro_batch
    recorder = Recorder(args, progress, optimizer, samples, local_batch, rank, world_size)
    if rank == 0 and path:
        print(f"resuming from {path}: step {progress.step}, saved by {ranks} ranks", flush=True)
    return PreparedRun(train_set, test_set, local_batch, model, optimizer, scaler, recorder)


def wrap_in_ddp(model: nn.Module, image: Tensor) -> DistributedDataParallel:
    """Wrap the model in DDP. image: any of the training set, (C, H, W)."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy is kept
    # DDP orders its buckets after the first backward. With one here, a resumed run adds in the same
    # order, so it rounds the same way.
    ddp.eval()(image[None]).sum().backward()
    model.zero_grad()
    return ddp


def train(args: Namespace, device: torch.device, agreement: Agreement, watchdog: Watchdog) -> None:
    rank, world_size, path = agreement.rank, agreement.world_size, args.run_dir / "checkpoint.pt"
    with agreement.fail_together():
        run = prepare(args, device, rank, world_size)
    recorder, progress = run.recorder, run.recorder.progress
    agreement.require_same(progress.step, "the step to resume from")  # is --run-dir a shared disk?
    test_shard = range(rank, len(run.test_set), world_size)  # each sample once
    options = loader_options(args)  # worker processes, pinned memory
    test_loader = RankLoader(Subset(run.test_set, test_shard), run.local_batch, **options)
    watchdog.step = lambda: progress.step  # the steps that are done

    ddp = wrap_in_ddp(run.model, run.train_set[0][0].to(device))
    crops = durable.SeededPerSample(run.train_set, args.seed)
    sampler = DistributedSampler(run.train_set, seed=args.seed, drop_last=True)  # no sample twice
    remaining = durable.SkipFirst(sampler)
    loader = RankLoader(crops, run.local_batch, sampler=remaining, drop_last=True, **options)
    while progress.epoch < args.epochs and progress.step < args.max_steps:
        epoch = progress.epoch
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        crops.epoch, remaining.skip = epoch, progress.epoch_step * run.local_batch
        rates = learning_rates(args, epoch, len(loader))[progress.epoch_step :]
        recorder.start_epoch(len(loader))
        batches = batches_until_save(loader, recorder, agreement)
        losses = train_epoch(ddp, batches, rates, run.optimizer, run.scaler, device, recorder)
        losses = agreement.mean_or_end(losses, run.model, progress.step, run.scaler.get_scale())
        ends_epoch = progress.epoch_step == 0 or progress.step >= args.max_steps
        scores = evaluate(run.model, test_loader, device) if ends_epoch else ()
        with agreement.fail_together():  # all ranks end if rank 0 cannot write
            if ends_epoch:
                recorder.end_epoch(epoch, losses, *scores)
            else:  # the next round trains the rest of this epoch, as a resumed run would
                recorder.write(epoch, losses)
            if rank == 0:  # one writer; a collective here would wait for the others forever
                state = checkpoint_state(recorder, run.model, run.optimizer, scaler=run.scaler)
                with durable.replacing(path) as file:
                    torch.save(state, file)
                recorder.print_epoch()
        if agreement.stopped and progress.epoch < args.epochs:
            print(f"rank {rank} stops after step {progress.step}: --resume auto continues")
            return
    with agreement.fail_together():
        recorder.finish()


def main() -> None:
    args = parse_args()
    rank, local_rank, world_size, local_world_size = read_launcher()
    device = torch.device("cpu")
    if args.device == "cuda":  # GPU 0 for local rank 0, 1 for 1, and so on
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = join_process_group(device, rank, world_size, local_world_size, args.timeout_seconds)
    agreement = Agreement(args.timeout_seconds)
    with Watchdog(store.clone(), rank, world_size, __file__, args.timeout_seconds) as watchdog:
        train(args, device, agreement, watchdog)


if __name__ == "__main__":
    with exit_on(UsageError, LaunchError, AgreementError, durable.CheckpointError, dist.DistError):
        main()
        dist.destroy_process_group()
