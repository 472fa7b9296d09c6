"""Stage 05 and all that keeps a run alive: it stops, resumes and fails on all ranks alike.

torchrun --standalone --nproc-per-node=2 survive/train.py --checkpoint-every-steps 100 --resume auto
"""

import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DistributedSampler, Subset

from common.checkpoint import FRESH, load_checkpoint
from common.data import ImageSet, load_dataset, make_loader
from common.models import build_model
from common.options import cut_batch, make_parser, number, usage_errors_exit
from common.record import Recorder, peak_memory_bytes

import durable
from agree import Agreement, AgreementError
from launch import LaunchError, end_with_rank, join, read_launcher
from watchdog import Watchdog

sys.path.insert(1, str(Path(__file__).parents[1] / "05_amp_syncbn"))
from schedule import add_schedule, learning_rates
from sync_batchnorm import convert

make_loader = partial(make_loader, worker_init_fn=end_with_rank)  # SIGTERM must not end loaders
DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args() -> Namespace:
    parser = make_parser("survive", __doc__)
    add, switch = parser.add_argument, BooleanOptionalAction  # type=bool: "False" would be True
    add("--amp", default="off", choices=tuple(DTYPES), help="dtype of forward and backward")
    add("--sync-bn", default=True, action=switch, help="BatchNorm over the global batch")
    add("--accumulate", default=1, type=number(int, 1), help="micro-batches per optimizer step")
    add("--clip-norm", type=number(float, 1e-30), help="upper limit for the norm of all gradients")
    add_schedule(parser)  # --lr-rule, --base-batch-size, --warmup-epochs, --lr-decay
    count = number(int, 1)
    add("--checkpoint-every-steps", default=10**9, type=count, help="besides each epoch's end")
    add("--timeout-seconds", default=600, type=count, help="time to wait for a missing rank")
    return parser.parse_args()


def find_checkpoint(args: Namespace, agreement: Agreement) -> Path | None:
    """What --resume or --evaluate names; auto: this run's newest checkpoint that is whole."""
    path = args.evaluate or args.resume
    if path == "auto":
        return durable.newest_whole(args.run_dir / "checkpoint.pt", agreement.first)
    if path is None or agreement.first(durable.is_whole, [Path(path)]):
        return path
    raise durable.CheckpointError(f"{path} is missing, damaged or no checkpoint: name another")


def resume(args: Namespace, path: Path | None, model: nn.Module, optimizer: SGD) -> dict:
    """Load the checkpoint at this path, if there is one."""
    if not path:
        return FRESH
    # As for --evaluate: unlike the stages, this script resumes inside an epoch, too.
    saved = load_checkpoint(Namespace(**vars(args) | {"evaluate": path}), model, optimizer)
    stage, *order = [saved["summary"][key] for key in ("stage", "seed", "global_batch")]
    same_order = order == [args.seed, args.batch_size] and not stage.startswith("03")
    if saved["epoch_step"] and not same_order and not args.evaluate:
        why = f"ends inside an epoch of {stage} with --seed {order[0]} --batch-size {order[1]}"
        raise durable.CheckpointError(f"{path} {why}: use the same")
    return saved


def until_checkpoint(loader: Iterable, recorder: Recorder, agreement: Agreement) -> Iterator:
    """The batches until the end of the epoch, the next checkpoint, or the step where all stop."""
    args = recorder.args
    for batch in islice(loader, args.max_steps - recorder.step):
        # Dropout masks are a function of the step, so a resumed run draws the same ones.
        durable.reseed(args.seed, recorder.epoch, recorder.epoch_step, agreement.rank)
        yield batch  # the training step runs while this line waits
        agreement.vote()  # without waiting; every rank must reach this line
        if agreement.stopped or recorder.step % args.checkpoint_every_steps == 0:
            break
    agreement.barrier()  # the recorder waits for the GPU next; every rank must reach this line


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
    return torch.stack(losses)


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


def prepare(
    args: Namespace, path: Path | None, device: torch.device, rank: int, world_size: int
) -> tuple:
    """What one rank can do, and check, alone. path: the checkpoint to start from."""
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
    saved = resume(args, path, model, optimizer)
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # stages 01 to 04 have none
    recorder = Recorder(args, optimizer, saved, local_batch, rank, world_size)
    if rank == 0 and "path" in saved:
        ranks = saved["summary"]["world_size"]
        print(f"resuming from {saved['path']}: step {saved['step']}, saved by {ranks} ranks")
    return train_set, test_set, local_batch, model, optimizer, scaler, saved, recorder


def train(args: Namespace, device: torch.device, agreement: Agreement, watchdog: Watchdog) -> None:
    rank, world_size, path = agreement.rank, agreement.world_size, args.run_dir / "checkpoint.pt"
    with agreement.fail_together():
        found = find_checkpoint(args, agreement)  # every rank must reach this line
    with agreement.fail_together():
        parts = prepare(args, found, device, rank, world_size)
    train_set, test_set, local_batch, model, optimizer, scaler, saved, recorder = parts
    agreement.same(saved["step"], "the step to resume from")  # or --run-dir is not a shared disk
    if args.evaluate:
        return recorder.end_evaluation(*evaluate(model, test_set, local_batch, device))
    if rank == 0:
        durable.set_aside(path, saved.get("path"))
    watchdog.step = lambda: recorder.step
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy is kept
    # DDP orders its buckets after the first backward. One here, and a resumed run rounds alike.
    ddp.eval()(train_set[0][0][None].to(device)).sum().backward()
    model.zero_grad()
    crops = durable.Resumable(train_set, args.seed)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # else: repeats samples
    remaining = durable.Remaining(sampler)
    loader = make_loader(crops, local_batch, remaining, args.workers)
    while (epoch := recorder.epoch) < args.epochs and recorder.step < args.max_steps:
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        crops.epoch, remaining.skip = epoch, recorder.epoch_step * local_batch
        rates = learning_rates(args, epoch, len(loader))[recorder.epoch_step :]
        batches = recorder.timed(until_checkpoint(loader, recorder, agreement), len(loader))
        losses = train_epoch(ddp, batches, rates, optimizer, scaler, device, args)
        losses = agreement.mean(losses, model, recorder.step, scaler.get_scale())  # nan ends all
        if recorder.epoch_step == 0 or recorder.step >= args.max_steps:
            recorder.end_epoch(epoch, losses, *evaluate(model, test_set, local_batch, device))
        else:  # the next round trains the rest of this epoch, as a resumed run would
            recorder.write(epoch, losses)
        with agreement.fail_together():
            if rank == 0:  # one writer; no collective may hide in here
                with durable.replacing(path) as file:
                    state = {key: getattr(recorder, key) for key in ("summary", *FRESH)}
                    owners = {"model": model, "optimizer": optimizer, "scaler": scaler}
                    state |= {name: owner.state_dict() for name, owner in owners.items()}
                    torch.save(state, file)
        if agreement.stopped and recorder.epoch < args.epochs:
            return print(f"rank {rank} stops after step {recorder.step}: --resume auto continues")
    peaks = [0] * world_size
    dist.all_gather_object(peaks, peak_memory_bytes(device))  # every rank must reach this line
    recorder.finish(device, peaks)


def main() -> None:
    args = parse_args()
    rank, local_rank, world_size, local_ranks = read_launcher()
    device = torch.device("cpu")
    if args.device == "cuda":  # GPU 0 for local rank 0, 1 for 1, and so on
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = join(device, rank, world_size, local_ranks, args.timeout_seconds)
    agreement = Agreement(args.timeout_seconds)
    with Watchdog(store.clone(), rank, world_size, __file__, args.timeout_seconds) as watchdog:
        train(args, device, agreement, watchdog)


if __name__ == "__main__":
    with usage_errors_exit(LaunchError, AgreementError, durable.CheckpointError):
        main()
        dist.destroy_process_group()
