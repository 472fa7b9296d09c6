"""Stage 01: one process trains on one device. With several, the places marked 1 to 6 change.

python 01_single_gpu/train.py
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, RandomSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_dataset, loader_options
from common.models import build_model
from common.options import UsageError, exit_on, make_parser
from common.record import Recorder


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
    args = make_parser("01_single_gpu", __doc__).parse_args()
    device = torch.device("cuda:0" if args.device == "cuda" else "cpu")  # place 3: the device
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, args.batch_size).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    progress = load_checkpoint(args, model, optimizer)

    options = loader_options(args)  # worker processes, pinned memory
    sampler = RandomSampler(train_set, generator=torch.Generator())  # place 4: the batches
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, args.batch_size, **options)  # place 2: the evaluation
    recorder = Recorder(args, progress, optimizer, len(train_set), args.batch_size)
    for epoch in range(progress.epoch, args.epochs):
        if progress.step >= args.max_steps:
            break
        sampler.generator.manual_seed(args.seed + epoch)  # the order depends on (seed, epoch)
        torch.manual_seed(args.seed + epoch)  # place 5: the random numbers of dropout, too
        recorder.start_epoch(len(loader))
        losses = train_epoch(model, loader, optimizer, device, recorder)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_loader, device))
        save_checkpoint(recorder, model, optimizer)  # place 6: the checkpoint
    recorder.finish()


if __name__ == "__main__":
    with exit_on(UsageError):
        main()
