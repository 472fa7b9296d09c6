"""Stage 04, where each rank keeps only 1/N of the optimizer's state, gradients and parameters.

torchrun --standalone --nproc-per-node=2 beyond/shard/train.py --shard parameters
"""

import os
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import loader_options, local_batch_size
from common.options import (
    DATASETS,
    MODELS,
    Parser,
    UsageError,
    exit_on,
    float_at_least,
    int_at_least,
    make_parser,
)
from common.record import Recorder
from levels import LEVELS, ShardedTraining, by_hand, by_library
from shards import ShardingError
from text_model import IGNORED, build_model, load_dataset


def parse_args() -> Namespace:
    stages = make_parser("shard", __doc__)  # two of its flags get one more choice here
    parser = Parser(__doc__, parents=[stages], conflict_handler="resolve")
    add, positive = parser.add_argument, int_at_least(1)
    add("--dataset", default="text", choices=("text", *DATASETS), help="data set to train on")
    add("--model", default="transformer", choices=("transformer", *MODELS), help="network to train")
    add("--width", default=128, type=positive, help="of the transformer: a multiple of 4")
    add("--layers", default=4, type=positive, help="blocks of the transformer")
    add("--optimizer", default="adamw", choices=("adamw", "sgd"), help="sgd: with --momentum")
    add("--shard", default="parameters", choices=LEVELS, help="what is divided, with all before it")
    add("--library", action="store_true", help="PyTorch's own classes instead of those by hand")
    add("--clip-norm", type=float_at_least(1e-30), help="upper limit for the norm of all gradients")
    add("--backend", default="nccl", choices=("gloo", "nccl"), help="for GPUs")
    parser.set_defaults(batch_size=32, epochs=1, lr=1e-3)
    args = parser.parse_args()
    over_gloo = args.device == "cuda" and args.backend == "gloo"
    if over_gloo and args.library and args.shard in ("gradients", "parameters"):
        # https://github.com/pytorch/pytorch/issues/152645
        crash = "torch crashes when it gathers FSDP's weights from GPUs over gloo"
        raise UsageError(f"{crash}: try --backend nccl, --device cpu, or no --library")
    return args


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


def shard(args: Namespace, model: nn.Module) -> ShardedTraining:
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "sgd":
        options["momentum"] = args.momentum
    optimizer_class = SGD if args.optimizer == "sgd" else AdamW
    make_training = by_library if args.library else by_hand
    return make_training(args.shard, model, optimizer_class, **options)


class EqualShard(Dataset):
    """Every world_size-th sample. Where a rank would have one less, it gets one without labels.

    With sharded parameters, each forward is a collective: all ranks need equally many batches.
    """

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.world_size)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.rank + index * self.world_size
        inputs, labels = self.dataset[sample % len(self.dataset)]
        labels = torch.as_tensor(labels)
        return inputs, labels if sample < len(self.dataset) else torch.full_like(labels, IGNORED)


def train_epoch(
    training: ShardedTraining,
    loader: Iterable,
    clip_norm: float | None,
    device: torch.device,
    recorder: Recorder,
) -> Tensor:
    """Train once on this rank's samples; return the loss of each step, (steps,), on the device.

    A loss is the mean over the labels of all ranks, which may have different numbers of them.
    """
    training.model.train()
    losses = []
    for inputs, labels in loader:
        inputs = inputs.to(device, non_blocking=True)  # (B, C, H, W), or (B, T) tokens
        labels = labels.to(device, non_blocking=True)  # (B,), or (B, T)
        tokens = (labels != IGNORED).sum()
        dist.all_reduce(tokens)  # each rank has another number of them
        logits = training.model(inputs).flatten(0, -2)  # (B, classes), or (B × T, 256)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / tokens
        training.optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()  # what follows is the ranks' mean, not their sum
        training.finish()  # waits for the gradients that are still under way
        if clip_norm:
            training.clip(clip_norm)
        training.optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at each step
        if recorder.step(loss):  # counts and times it; true at --max-steps
            break
    epoch_losses = torch.stack(losses)
    dist.all_reduce(epoch_losses)  # once per epoch, because each message costs time
    return epoch_losses


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over the test set, each sample or token counted once."""
    model.eval()
    for buffer in model.buffers():  # BatchNorm's running statistics may differ, so use rank 0's
        dist.broadcast(buffer, src=0)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, labels
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device).flatten()
        logits = model(inputs).flatten(0, -2)  # (B, classes), or (B × T, 256)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += (labels != IGNORED).sum()
    dist.all_reduce(totals)  # place 2: sums and counts, as the shards may differ by a sample
    loss, correct, counted = totals.tolist()
    return loss / counted, correct / counted


def main() -> None:
    args = parse_args()
    # torchrun has set WORLD_SIZE. So a wrong call ends here, before the ranks connect.
    local_batch = local_batch_size(args.batch_size, int(os.environ.get("WORLD_SIZE", 1)))
    device = join_process_group(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, test_set = load_dataset(args)
    test_shard = EqualShard(test_set, rank, world_size)
    options = loader_options(args)  # worker processes, pinned memory
    test_loader = DataLoader(test_shard, local_batch, **options)
    torch.manual_seed(args.seed)
    model = build_model(args, train_set, local_batch).to(device)
    training = shard(args, model)  # rank 0's weights now, mean gradients in each backward
    full_state = training.model_state, training.optimizer_state
    progress = load_checkpoint(args, *full_state)
    samples = len(train_set)
    recorder = Recorder(args, progress, training.optimizer, samples, local_batch, rank, world_size)

    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # place 4: no repeats
    loader = DataLoader(train_set, local_batch, sampler=sampler, drop_last=True, **options)
    for epoch in range(progress.epoch, args.epochs):
        if progress.step >= args.max_steps:
            break
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        torch.manual_seed(args.seed + epoch * world_size + rank)  # place 5: its own dropout masks
        recorder.start_epoch(len(loader))
        losses = train_epoch(training, loader, args.clip_norm, device, recorder)
        recorder.end_epoch(epoch, losses, *evaluate(training.model, test_loader, device))
        for state in full_state:
            state.collect()  # every rank sends its parts, and rank 0 puts them together
        if rank == 0:  # place 6: one writer; never a collective in here
            save_checkpoint(recorder, *full_state)
    recorder.finish()


if __name__ == "__main__":
    with exit_on(UsageError, ShardingError, dist.DistError):
        main()
        dist.destroy_process_group()
