"""Stage 01: one process trains on one device; all later stages are compared with it.

Run it from the root of the repository:

    python 01_single_gpu/train.py
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import RandomSampler

from common.checkpoint import restore, save_checkpoint
from common.data import ImageSet, load_dataset, make_loader, prepare_dataset
from common.models import build_model
from common.options import UsageError, make_parser, usage_errors_exit
from common.record import Recorder, peak_memory_bytes


def pick_device(wanted: str) -> torch.device:
    """The GPU if there is one, unless --device says otherwise."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none here: try --device cpu")
    return torch.device("cpu" if wanted == "cpu" or not torch.cuda.is_available() else "cuda")


def train_epoch(
    model: nn.Module, loader: Iterable, optimizer: Optimizer, device: torch.device
) -> Tensor:
    """One pass over the training set; returns the loss of every step, (steps,), on the device."""
    model.train()
    losses = []
    for images, labels in loader:
        images = images.to(device, non_blocking=True)  # (B, C, H, W)
        labels = labels.to(device, non_blocking=True)  # (B,)
        loss = F.cross_entropy(model(images), labels)  # the mean over the batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU at every step
    return torch.stack(losses)


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: ImageSet, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Mean loss and accuracy over the whole data set, each sample counted once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # sums: loss, correct, samples
    for images, labels in make_loader(dataset, batch_size):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)  # (B, classes)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)  # the last batch is smaller: weight by its own size
    loss, correct, samples = totals.tolist()
    return loss / samples, correct / samples


def main() -> None:
    args = make_parser("01_single_gpu", __doc__).parse_args()
    device = pick_device(args.device)

    prepare_dataset(args)
    train_set, test_set = load_dataset(args)
    torch.manual_seed(args.seed)
    model = build_model(args.model, train_set, args.batch_size).to(device)
    optimizer = SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    start = restore(args, model, optimizer)
    recorder = Recorder(args, device, world_size=1, local_batch=args.batch_size, start=start)
    if args.evaluate:
        recorder.end_evaluation(*evaluate(model, test_set, args.batch_size, device))
        return

    print(f"global batch {args.batch_size} = 1 × {args.batch_size} (one device)")
    generator = torch.Generator()
    sampler = RandomSampler(train_set, generator=generator)
    loader = make_loader(train_set, args.batch_size, sampler, args.workers)
    for epoch in recorder.epochs():
        generator.manual_seed(args.seed + epoch)  # the order is a function of seed and epoch
        # watch: the step's dropout masks are such a function too; time it; stop at --max-steps
        losses = train_epoch(model, recorder.watch(loader), optimizer, device)
        recorder.end_epoch(epoch, losses, *evaluate(model, test_set, args.batch_size, device))
        save_checkpoint(recorder, model, optimizer)
    recorder.finish([peak_memory_bytes(device)])


if __name__ == "__main__":
    with usage_errors_exit():
        main()
