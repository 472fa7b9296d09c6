"""Stage 02: one process trains a replica of the model on each GPU, on a part of each batch.

python 02_data_parallel/train.py
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, RandomSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_dataset, loader_options, local_batch_size
from common.models import build_model
from common.options import UsageError, exit_on, int_at_least, make_parser
from common.record import Recorder
from from_scratch import DataParallel as DataParallelOnOneDevice


def train_epoch(
    model: nn.Module, loader: Iterable, optimizer: SGD, device: torch.device, recorder: Recorder
) -> Tensor:
    """One pass over the training set; returns the loss of each step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the batch
        optimizer.zero_grad()
        loss.backward()
        # place 1: the step; here, several processes must average their gradients
        optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at each step
        if recorder.step(loss):  # counts and times it; true at --max-steps
            break
    return torch.stack(losses)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over the test set, each sample counted once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)  # (B, classes)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)  # the last batch is smaller, so it counts by its own size
    # place 2: the evaluation; here, several processes must add up their totals
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


def main() -> None:
    parser = make_parser("02_data_parallel", __doc__)
    replicas_help = "default: one per GPU, at least two"
    parser.add_argument("--replicas", type=int_at_least(1), help=replicas_help)
    args = parser.parse_args()
    device = torch.device("cuda:0" if args.device == "cuda" else "cpu")  # place 3: the device
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    replicas = args.replicas or max(gpus, 2)
    local_batch = local_batch_size(args.batch_size, replicas)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, local_batch).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    progress = load_checkpoint(args, model, optimizer)

    # The lesson: wrap the model. Train and evaluate the wrapper, but save the model inside it.
    if replicas <= gpus:
        parallel: nn.Module = nn.DataParallel(model, range(replicas))  # a replica on each GPU
    else:  # too few GPUs: ours computes the same, with all replicas on one device
        parallel = DataParallelOnOneDevice(model, [device] * replicas)
    options = loader_options(args)  # worker processes, pinned memory
    sampler = RandomSampler(train_set, generator=torch.Generator())  # place 4: the batches
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, args.batch_size, **options)  # place 2: the evaluation
    recorder = Recorder(args, progress, optimizer, len(train_set), local_batch)
    for epoch in range(progress.epoch, args.epochs):
        if progress.step >= args.max_steps:
            break
        sampler.generator.manual_seed(args.seed + epoch)  # the order depends on (seed, epoch)
        torch.manual_seed(args.seed + epoch)  # place 5: the random numbers of dropout, too
        for gpu in range(gpus):  # otherwise every GPU would draw the same dropout masks
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(args.seed + epoch * gpus + gpu)
        recorder.start_epoch(len(loader))
        losses = train_epoch(parallel, loader, optimizer, device, recorder)  # the wrapper
        recorder.end_epoch(epoch, losses, *evaluate(parallel, test_loader, device))
        save_checkpoint(recorder, model, optimizer)  # place 6: the checkpoint
    recorder.finish()


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
